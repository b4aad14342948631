// SPDX-License-Identifier: Apache-2.0
// llama.cpp from a model file to the first token of a one-token prompt: on standard output seconds by the wall
// clock, those of all threads on CPUs, and the token.
//
//     llama_start FILE THREADS REPACK        REPACK: 0 or 1, whether weights are laid out anew
//
// The clock starts when the library is ready, so what a process costs is left out.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "llama.h"

static double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const auto begin = std::chrono::steady_clock::now();
    const double began = cpu_seconds();

    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = std::atoi(argv[3]) != 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (model == nullptr) {
        return 1;
    }
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = 2048;
    context_params.n_threads = context_params.n_threads_batch = std::atoi(argv[2]);
    llama_context * context = llama_init_from_model(model, context_params);
    if (context == nullptr) {
        return 1;
    }
    llama_token first = 1;
    if (llama_decode(context, llama_batch_get_one(&first, 1)) != 0) {
        return 1;
    }
    const float * logits = llama_get_logits_ith(context, -1);
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const long token = std::max_element(logits, logits + vocab) - logits;

    const double spent = cpu_seconds() - began;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%.6f %.6f %ld\n", took.count(), spent, token);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
