// SPDX-License-Identifier: Apache-2.0
// Both stages of topk by workgroups of 256. Stage 1 first finds the 64 lists with the greatest heads (of
// equals the first): each has an entry that comes before all of the others', so no other list
// counts. Of their 4096 entries it takes the best as stage 0 does of 1024 logits.
#include "wide.glsl"

shared uint tallies[PVR_WG_X], totals[16];
shared uint chosen_key[TOP], chosen_id[TOP];
shared uint lists[TOP];

// The sum of x over the workgroup, for all of it.
uint tally(uint lane, uint x) {
#if defined(WIDE_SUBGROUP)
    x = subgroupAdd(x);
    barrier();
    if (subgroupElect())
        tallies[gl_SubgroupID] = x;
    barrier();
    uint sum = 0u;
    for (uint i = 0u; i < gl_NumSubgroups; i++)
        sum += tallies[i];
    return sum;
#else
    tallies[lane] = x;
    barrier();
    uint sum = 0u;
    if (lane < 16u) {
        for (uint i = 0u; i < 16u; i++)
            sum += tallies[lane * 16u + i];
        totals[lane] = sum;
    }
    barrier();
    sum = 0u;
    for (uint i = 0u; i < 16u; i++)
        sum += totals[i];
    return sum;
#endif
}

// The sum of x over the invocations before this one; `all` over all of them.
uint tally_before(uint lane, uint x, out uint all) {
    barrier();
    tallies[lane] = x;
    barrier();
    uint sum = 0u;
    if (lane < 16u) {
        for (uint i = 0u; i < 16u; i++)
            sum += tallies[lane * 16u + i];
        totals[lane] = sum;
    }
    barrier();
    sum = 0u;
    all = 0u;
    for (uint i = 0u; i < 16u; i++) {
        sum += i < lane >> 4 ? totals[i] : 0u;
        all += totals[i];
    }
    for (uint i = lane & ~15u; i < lane; i++)
        sum += tallies[i];
    return sum;
}

// Puts the TOP greatest of the workgroup's keys and their numbers into chosen_key and chosen_id, in
// no order; of equals those with the lower numbers. Invocation i has the numbers from each * i on.
#define TOPK_SELECT(name, each)                                                        \
    void name(uint lane, uint keys[each]) {                                            \
        uint limit = 0u; /* at least TOP keys reach it */                              \
        for (uint bit = 0x80000000u; bit != 0u; bit >>= 1) {                           \
            uint count = 0u;                                                           \
            for (uint i = 0u; i < each; i++)                                           \
                count += keys[i] >= (limit | bit) ? 1u : 0u;                           \
            count = tally(lane, count);                                                \
            if (count >= TOP)                                                          \
                limit |= bit;                                                          \
            if (count == TOP)                                                          \
                break;                                                                 \
        }                                                                              \
        uint above = 0u, equal = 0u, all;                                              \
        for (uint i = 0u; i < each; i++) {                                             \
            above += keys[i] > limit ? 1u : 0u;                                        \
            equal += keys[i] == limit ? 1u : 0u;                                       \
        }                                                                              \
        uint before = tally_before(lane, above | (equal << 16), all);                  \
        uint next = before & 0xffffu, next_equal = (all & 0xffffu) + (before >> 16);   \
        for (uint i = 0u; i < each; i++) {                                             \
            uint place = TOP;                                                          \
            if (keys[i] > limit)                                                       \
                place = next++;                                                        \
            else if (keys[i] == limit)                                                 \
                place = next_equal++;                                                  \
            if (place < TOP) {                                                         \
                chosen_key[place] = keys[i];                                           \
                chosen_id[place] = lane * each + i;                                    \
            }                                                                          \
        }                                                                              \
        barrier();                                                                     \
    }

TOPK_SELECT(select_logits, 4)
TOPK_SELECT(select_lists, 8)
TOPK_SELECT(select_entries, 16)

// How many of those that were chosen come before one of them.
uint rank_of(uint i) {
    uint rank = 0u;
    for (uint j = 0u; j < TOP; j++) {
        bool first = chosen_key[j] > chosen_key[i] ||
                     (chosen_key[j] == chosen_key[i] && chosen_id[j] < chosen_id[i]);
        rank += first ? 1u : 0u;
    }
    return rank;
}

void blockwise(uint lane, uint group) {
    uint base = group * BLOCK, keys[4];
    for (uint i = 0u; i < 4u; i++) {
        uint id = base + lane * 4u + i;
        keys[i] = id < push.v ? key_of(logits[id]) : 0u;
    }
    float top = uintBitsToFloat(LEAST), sum = 0.0;
    for (uint i = 0u; i < 4u; i++)
        top = keys[i] > 1u ? max(top, value_of(keys[i])) : top;
    top = wide_max(top);
    for (uint i = 0u; i < 4u; i++)
        sum += keys[i] > 1u ? weight_of(value_of(keys[i]), top) : 0.0;
    sum = wide_sum(sum);
    select_logits(lane, keys);
    if (lane < TOP) {
        uint at = group * RECORD + 2u * rank_of(lane), id = base + chosen_id[lane];
        bool there = chosen_key[lane] > 0u;
        part[at] = there ? id : NONE;
        part[at + 1u] = there ? logits[id] : LEAST;
    }
    if (lane == 0u) {
        part[group * RECORD + 128u] = floatBitsToUint(top);
        part[group * RECORD + 129u] = floatBitsToUint(sum);
    }
}

uint entry_key(uint list, uint entry, uint blocks) {
    uint at = list * RECORD + 2u * entry;
    return list < blocks && part[at] != NONE ? key_of(part[at + 1u]) : 0u;
}

void merge(uint lane, uint blocks) {
    float top = uintBitsToFloat(LEAST), sum = 0.0;
    for (uint b = lane; b < blocks; b += PVR_WG_X)
        top = max(top, uintBitsToFloat(part[b * RECORD + 128u]));
    top = wide_max(top);
    for (uint b = lane; b < blocks; b += PVR_WG_X)
        sum += uintBitsToFloat(part[b * RECORD + 129u]) *
               weight_of(uintBitsToFloat(part[b * RECORD + 128u]), top);
    sum = wide_sum(sum);
    if (lane == 0u) {
        result[128] = floatBitsToUint(top);
        result[129] = floatBitsToUint(sum > 0.0 ? top + log(sum) : top);
    }

    uint heads[8];
    for (uint i = 0u; i < 8u; i++)
        heads[i] = entry_key(lane * 8u + i, 0u, blocks);
    select_lists(lane, heads);
    if (lane < TOP) {  // in order of their ids, for equal entries to be numbered in theirs
        uint place = 0u;
        for (uint j = 0u; j < TOP; j++)
            place += chosen_id[j] < chosen_id[lane] ? 1u : 0u;
        lists[place] = chosen_id[lane];
    }
    barrier();
    uint entries[16];
    for (uint i = 0u; i < 16u; i++)
        entries[i] = entry_key(lists[lane >> 2], (lane & 3u) * 16u + i, blocks);
    select_entries(lane, entries);
    if (lane < TOP) {
        uint to = 2u * rank_of(lane), entry = chosen_id[lane];
        uint at = lists[entry >> 6] * RECORD + 2u * (entry & 63u);
        bool there = chosen_key[lane] > 0u;
        result[to] = there ? part[there ? at : 0u] : NONE;
        result[to + 1u] = there ? part[there ? at + 1u : 0u] : LEAST;
    }
}
