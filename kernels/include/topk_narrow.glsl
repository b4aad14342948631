// SPDX-License-Identifier: Apache-2.0
// Both stages of topk by workgroups of 32. In stage 1 an invocation keeps the best head of its lists,
// and 64 rounds take the best of all; with WIDE_SUBGROUP by subgroup arithmetic, as the counts of
// stage 0.

// Stage 0: keys, a word of padding for each 32. Stage 1: the heads of the lists.
shared uint keys[2048];
shared uint reduced[2][32];
shared uint chosen_key[2][32], chosen_id[2][32];

float sum_over_group(uint lane, uint turn, float x) {
    reduced[turn][lane] = floatBitsToUint(x);
    barrier();
    float sum = 0.0;
    for (uint i = 0u; i < 32u; i++)
        sum += uintBitsToFloat(reduced[turn][i]);
    return sum;
}

// Likewise; turns are 0 and 1 by turns.
uint tally(uint lane, uint turn, uint x) {
#if defined(WIDE_SUBGROUP)
    x = subgroupAdd(x);
    if (gl_NumSubgroups == 1u)
        return x;
    if (subgroupElect())
        reduced[turn][gl_SubgroupID] = x;
    uint parts = gl_NumSubgroups;
#else
    reduced[turn][lane] = x;
    uint parts = 32u;
#endif
    barrier();
    x = 0u;
    for (uint i = 0u; i < parts; i++)
        x += reduced[turn][i];
    return x;
}

void blockwise(uint lane, uint group) {
    uint base = group * BLOCK;
    uint most = 0u;
    for (uint i = 0u; i < 32u; i++) {
        uint id = base + i * 32u + lane;
        uint key = id < push.v ? key_of(logits[id]) : 0u;
        keys[i * 33u + lane] = key;
        most = max(most, key);
    }
    reduced[1][lane] = most;
    barrier();
    for (uint i = 0u; i < 32u; i++)
        most = max(most, reduced[1][i]);
    float top = most > 1u ? value_of(most) : uintBitsToFloat(LEAST);

    uint own = lane * 33u;  // this invocation's 32 neighbours, from now on
    uint limit = 0u;        // the greatest key that at least 64 keys reach
    for (uint bit = 0u; bit < 32u; bit++) {
        uint wanted = limit | (0x80000000u >> bit);
        uint count = 0u;
        for (uint i = 0u; i < 32u; i++)
            count += keys[own + i] >= wanted ? 1u : 0u;
        if (tally(lane, bit & 1u, count) >= TOP)
            limit = wanted;
    }

    uint above = 0u, equal = 0u;
    float sum = 0.0;
    for (uint i = 0u; i < 32u; i++) {
        uint key = keys[own + i];
        above += key > limit ? 1u : 0u;
        equal += key == limit ? 1u : 0u;
        sum += key > 1u ? weight_of(value_of(key), top) : 0.0;
    }
    sum = sum_over_group(lane, 0u, sum);
    reduced[1][lane] = above | (equal << 16);
    barrier();
    uint before = 0u, all = 0u;
    for (uint i = 0u; i < 32u; i++) {
        before += i < lane ? reduced[1][i] : 0u;
        all += reduced[1][i];
    }
    uint next = before & 0xffffu, next_equal = (all & 0xffffu) + (before >> 16);
    for (uint i = 0u; i < 32u; i++) {
        uint key = keys[own + i];
        uint place = TOP;
        if (key > limit)
            place = next++;
        else if (key == limit)
            place = next_equal++;
        if (place < TOP) {
            chosen_key[place >> 5][place & 31u] = key;
            chosen_id[place >> 5][place & 31u] = lane * 32u + i;
        }
    }
    barrier();
    for (uint half_ = 0u; half_ < 2u; half_++) {
        uint key = chosen_key[half_][lane], id = chosen_id[half_][lane];
        uint rank = 0u;
        for (uint i = 0u; i < TOP; i++) {
            uint other = chosen_key[i >> 5][i & 31u];
            bool first = other > key || (other == key && chosen_id[i >> 5][i & 31u] < id);
            rank += first ? 1u : 0u;
        }
        uint at = group * RECORD + 2u * rank;
        part[at] = key > 0u ? base + id : NONE;
        part[at + 1u] = key > 0u ? logits[base + id] : LEAST;
    }
    if (lane == 0u) {
        part[group * RECORD + 128u] = floatBitsToUint(top);
        part[group * RECORD + 129u] = floatBitsToUint(sum);
    }
}

void merge(uint lane, uint blocks) {
    float top = uintBitsToFloat(LEAST);
    for (uint b = lane; b < blocks; b += 32u) {
        top = max(top, uintBitsToFloat(part[b * RECORD + 128u]));
        keys[b] = 0u;
    }
    reduced[1][lane] = floatBitsToUint(top);
    barrier();
    for (uint i = 0u; i < 32u; i++)
        top = max(top, uintBitsToFloat(reduced[1][i]));
    float sum = 0.0;
    for (uint b = lane; b < blocks; b += 32u)
        sum += uintBitsToFloat(part[b * RECORD + 129u]) *
               weight_of(uintBitsToFloat(part[b * RECORD + 128u]), top);
    sum = sum_over_group(lane, 0u, sum);
    if (lane == 0u) {
        result[128] = floatBitsToUint(top);
        result[129] = floatBitsToUint(sum > 0.0 ? top + log(sum) : top);
    }

    uint best_key = 0u, best_id = NONE, best_list = 0u;
    bool stale = true;
    for (uint turn = 0u; turn < TOP; turn++) {
        if (stale) {
            best_key = 0u;
            best_id = NONE;
            for (uint b = lane; b < blocks; b += 32u) {
                if (keys[b] >= TOP)
                    continue;
                uint at = b * RECORD + 2u * keys[b];
                uint id = part[at];
                uint key = id == NONE ? 0u : key_of(part[at + 1u]);
                if (key > best_key || (key == best_key && id < best_id)) {
                    best_key = key;
                    best_id = id;
                    best_list = b;
                }
            }
            stale = false;
        }
        uint slot = turn & 1u;
#if defined(WIDE_SUBGROUP)
        uint most = subgroupMax(best_key);
        uint first = subgroupMin(best_key == most ? best_id : NONE);
        if (gl_NumSubgroups > 1u) {
            if (subgroupElect()) {
                chosen_key[slot][gl_SubgroupID] = most;
                chosen_id[slot][gl_SubgroupID] = first;
            }
            barrier();
            for (uint i = 0u; i < gl_NumSubgroups; i++) {
                uint key = chosen_key[slot][i], id = chosen_id[slot][i];
                if (key > most || (key == most && id < first)) {
                    most = key;
                    first = id;
                }
            }
        }
        // Without anything left all have the same, and one of them says so.
        bool wins = first == NONE ? lane == 0u : best_key == most && best_id == first;
#else
        chosen_key[slot][lane] = best_key;
        chosen_id[slot][lane] = best_id;
        barrier();
        uint winner = 0u;
        for (uint i = 1u; i < 32u; i++) {
            uint key = chosen_key[slot][i], most = chosen_key[slot][winner];
            if (key > most || (key == most && chosen_id[slot][i] < chosen_id[slot][winner]))
                winner = i;
        }
        bool wins = winner == lane;
#endif
        if (wins) {
            bool none = best_id == NONE;
            result[2u * turn] = best_id;
            uint at = best_list * RECORD + 2u * keys[best_list] + 1u;
            result[2u * turn + 1u] = none ? LEAST : part[none ? 0u : at];
            if (!none)
                keys[best_list]++;
            stale = true;
        }
    }
}
