// SPDX-License-Identifier: Apache-2.0
// llama.cpp's speed with one model, measured on demand, so that its runs can stand between another program's.
//
//     llama_rate FILE THREADS REPACK ATTENTION BEHIND
//
// REPACK: 0 or 1, whether weights are laid out anew; ATTENTION: 0 or 1, flash attention. For each line `prefill N` or
// `decode N` on standard input: N tokens of a prompt, or N tokens one by one behind a prompt of BEHIND, which is read
// where it is not in the cache yet, and not timed; then a line with the seconds by the wall clock, and those of all
// threads together on the CPU.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>

#include "llama.h"

static double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

static bool feed(llama_context * context, std::vector<llama_token> tokens) {
    const bool ok = llama_decode(context, llama_batch_get_one(tokens.data(), int32_t(tokens.size()))) == 0;
    llama_synchronize(context);
    return ok;
}

static std::vector<llama_token> prompt_of(int count, int vocab) {
    std::vector<llama_token> prompt;
    for (int i = 0; i < count; i++) {
        prompt.push_back(7 * i % vocab);
    }
    return prompt;
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        return 2;
    }
    const int behind = std::atoi(argv[5]);
    if (behind < 1 || behind > 1000) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = std::atoi(argv[3]) != 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        return 1;
    }
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = 1024;
    context_params.n_threads = context_params.n_threads_batch = std::atoi(argv[2]);
    context_params.flash_attn_type = std::atoi(argv[4]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        return 1;
    }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    llama_memory_t memory = llama_get_memory(context);
    char phase[16];
    int n, held = 0; // of the prompt's tokens that are in the cache
    while (std::scanf("%15s %d", phase, &n) == 2) {
        const bool decode = std::strcmp(phase, "decode") == 0;
        if (n < 1 || n > 1000 || behind + n > int(llama_n_ctx(context))) {
            return 1;
        }
        if (!decode || held < behind) {
            llama_memory_clear(memory, true);
            held = 0;
        }
        if (decode && held == 0 && !feed(context, prompt_of(behind, vocab))) {
            return 1;
        }
        if (decode && !llama_memory_seq_rm(memory, 0, behind, -1)) {
            return 1;
        }
        held = decode ? behind : n;
        const std::vector<llama_token> prompt = prompt_of(n, vocab);
        const auto begin = std::chrono::steady_clock::now();
        const double began = cpu_seconds();
        for (int i = 0; decode && i < n; i++) {
            if (!feed(context, {prompt[size_t(i)]})) {
                return 1;
            }
        }
        if (!decode && !feed(context, prompt)) {
            return 1;
        }
        const double spent = cpu_seconds() - began;
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        std::printf("%.9f %.9f\n", took.count(), spent);
        std::fflush(stdout);
    }
    llama_free(context);
    llama_model_free(model);
    return 0;
}
