/* Rotary positions, keys and values in a paged cache, and attention.

A block of the KV cache has as many numbers as `../blocks.py` says, in an order of its own: keys are
[KV heads, head_dim, size], so that a vector holds one number each of LANES keys, and values are
[size, KV heads, head_dim]. */

#include "vectors.h"

#define SPAN 128 /* keys whose scores exist at once, for each query */
#define QUERIES 4 /* queries that share what is read of keys and values */

/* Where the tokens of a step are. */
struct step {
    const int64_t *positions; /* of each row in its sequence */
    const int32_t *slots; /* of each row: which row of `tables` is its sequence's */
    const int32_t *tables; /* [slots, width]: the blocks of each sequence */
    const int32_t *tiles; /* [tile_count + 1] rows: those from one to before the next are of one sequence */
    int64_t rows, width, tile_count;
    int size; /* of a block: a multiple of LANES that divides SPAN */
    int heads, kv_heads, dim, threads;
};

/* Rotate queries and keys in place, and store keys and values.

`projected`: [rows, heads + 2 * kv_heads, dim]. `cos`, `sin`: [positions, pairs]; pairs of neighbours are
rotated, the first `pairs` of a head. */
static void rotate_and_store(const struct step *step, float *projected, const float *cos, const float *sin, int pairs,
                             float *keys, float *values) {
    int dim = step->dim, size = step->size, turned = step->heads + step->kv_heads;
    int64_t width = (int64_t)step->kv_heads * dim, row_numbers = (int64_t)turned * dim + width;
#pragma omp parallel for num_threads(step->threads) if (step->rows * row_numbers > WORTH)
    for (int64_t row = 0; row < step->rows; row++) {
        float *numbers = projected + row * row_numbers;
        int64_t position = step->positions[row], place = position % size;
        for (int head = 0; head < turned; head++)
            for (int pair = 0; pair < pairs; pair++) {
                float *x = numbers + (int64_t)head * dim + 2 * pair, *y = x + 1, before = *x;
                float c = cos[position * pairs + pair], s = sin[position * pairs + pair];
                *x = before * c - *y * s;
                *y = *y * c + before * s;
            }
        int64_t block = step->tables[step->slots[row] * step->width + position / size] * size * width;
        const float *key = numbers + (int64_t)step->heads * dim;
        for (int64_t at = 0; at < width; at++) keys[block + at * size + place] = key[at];
        memcpy(values + block + place * width, key + width, sizeof(float) * width);
    }
}

/* Scores of `count` queries with LANES keys: `scores` has room for SPAN of each query. */
INLINE void dot(const float *const *queries, const int count, const float *keys, int dim, int size, float scale,
                float *scores) {
    vec totals[QUERIES] = {0}, others[QUERIES] = {0};
    for (int at = 0; at + 1 < dim; at += 2)
        for (int query = 0; query < count; query++) {
            totals[query] += queries[query][at] * load(keys + (int64_t)at * size);
            others[query] += queries[query][at + 1] * load(keys + (int64_t)(at + 1) * size);
        }
    if (dim % 2)
        for (int query = 0; query < count; query++)
            totals[query] += queries[query][dim - 1] * load(keys + (int64_t)(dim - 1) * size);
    for (int query = 0; query < count; query++)
        store(scores + query * SPAN, (totals[query] + others[query]) * scale);
}

/* Add `weights` times values of `found` keys to LANES numbers of each of `count` outputs. */
INLINE void gather(const float *weights, const int count, int found, const float *values, int64_t stride,
                   float *const *outputs) {
    vec totals[QUERIES];
    for (int query = 0; query < count; query++) totals[query] = load(outputs[query]);
    for (int key = 0; key < found; key++)
        for (int query = 0; query < count; query++)
            totals[query] += weights[query * SPAN + key] * load(values + key * stride);
    for (int query = 0; query < count; query++) store(outputs[query], totals[query]);
}

/* What the compiler knows the number of queries of is held in registers. */
#define BY_COUNT(call, ...)                                  \
    switch (count) {                                         \
    case 1: { const int n = 1; call(__VA_ARGS__); break; }   \
    case 2: { const int n = 2; call(__VA_ARGS__); break; }   \
    case 3: { const int n = 3; call(__VA_ARGS__); break; }   \
    default: { const int n = QUERIES; call(__VA_ARGS__); }   \
    }

/* Attend with `count` queries, at most QUERIES, which share a KV head and a sequence.

Softmax is computed a span of keys at a time, with a running maximum: Dao et al., "FlashAttention" (arXiv
2205.14135), section 3.1.

`positions`: of the last key that each query attends to. `slopes`: NULL, or what is added to each query's
scores for each position that a key is further on. `table`: the sequence's blocks. `keys`, `values`: of the KV
head in block 0. `outputs`: of each query, dim numbers. */
static void attend_together(const struct step *step, const float *const *queries, int count, const int64_t *positions,
                            const float *slopes, const int32_t *table, const float *keys, const float *values,
                            float *const *outputs) {
    float scores[QUERIES * SPAN] __attribute__((aligned(64)));
    float most[QUERIES], total[QUERIES], scale = 1.0f / sqrtf((float)step->dim);
    int dim = step->dim, size = step->size;
    int64_t stride = (int64_t)step->kv_heads * dim, longest = 0;
    for (int query = 0; query < count; query++) {
        most[query] = -INFINITY, total[query] = 0;
        memset(outputs[query], 0, sizeof(float) * dim);
        if (positions[query] >= longest) longest = positions[query] + 1;
    }
    for (int64_t start = 0; start < longest; start += SPAN) {
        int found = longest - start < SPAN ? longest - start : SPAN;
        for (int at = 0; at < found; at += LANES) {
            const float *own = keys + table[(start + at) / size] * size * stride + (start + at) % size;
            BY_COUNT(dot, queries, n, own, dim, size, scale, scores + at)
        }
        for (int query = 0; query < count; query++) {
            float *own = scores + query * SPAN;
            int64_t seen = positions[query] + 1 - start;
            vec highest = splat(most[query]), sums = {0};
            for (int at = 0; at < found; at += LANES) {
                if (slopes)
                    for (int lane = 0; lane < LANES; lane++)
                        own[at + lane] += slopes[query] * (float)(at + lane + 1 - seen);
                for (int64_t key = seen > at ? seen : at; key < at + LANES; key++) own[key] = -INFINITY;
                highest = larger(load(own + at), highest);
            }
            float before = most[query];
            for (int lane = 0; lane < LANES; lane++)
                if (highest[lane] > most[query]) most[query] = highest[lane];
            for (int at = 0; at < found; at += LANES) {
                vec weights = exponential(load(own + at) - most[query]);
                store(own + at, weights);
                sums += weights;
            }
            if (before == most[query]) {
                total[query] += sum(sums);
            } else {
                float kept = expf(before - most[query]);
                total[query] = total[query] * kept + sum(sums);
                for (int at = 0; at < dim; at++) outputs[query][at] *= kept;
            }
        }
        for (int at = 0; at < found; at += size) {
            int here = found - at < size ? found - at : size, number = 0;
            const float *own = values + table[(start + at) / size] * size * stride;
            for (; number + LANES <= dim; number += LANES) {
                float *parts[QUERIES];
                for (int query = 0; query < count; query++) parts[query] = outputs[query] + number;
                BY_COUNT(gather, scores + at, n, here, own + number, stride, parts)
            }
            for (; number < dim; number++)
                for (int query = 0; query < count; query++)
                    for (int key = 0; key < here; key++)
                        outputs[query][number] += scores[query * SPAN + at + key] * own[key * stride + number];
        }
    }
    for (int query = 0; query < count; query++)
        for (int at = 0; at < dim; at++) outputs[query][at] /= total[query];
}

/* Rotate and store, then attend: each row to its sequence up to itself.

`slopes`: NULL, or [heads], as above. `outputs`: [rows, heads, dim]; the rest as above. */
void attend(const struct step *step, float *projected, const float *cos, const float *sin, int pairs,
            const float *slopes, float *keys, float *values, float *outputs) {
    rotate_and_store(step, projected, cos, sin, pairs, keys, values);
    const int32_t *tiles = step->tiles;
    int heads = step->heads, dim = step->dim, shared = heads / step->kv_heads;
    int64_t work = 0;
    for (int64_t tile = 0; tile < step->tile_count; tile++)
        work += (step->positions[tiles[tile]] + 1) * (tiles[tile + 1] - tiles[tile]) * heads * dim;
#pragma omp parallel for num_threads(step->threads) schedule(dynamic) if (work > WORTH)
    for (int64_t item = 0; item < step->tile_count * step->kv_heads; item++) {
        int64_t tile = item / step->kv_heads, kv_head = item % step->kv_heads;
        int first = tiles[tile], queries = (tiles[tile + 1] - first) * shared;
        for (int start = 0; start < queries; start += QUERIES) {
            int together = queries - start < QUERIES ? queries - start : QUERIES;
            const float *numbers[QUERIES];
            float *results[QUERIES], own_slopes[QUERIES];
            int64_t last[QUERIES];
            for (int query = 0; query < together; query++) {
                int64_t row = first + (start + query) / shared, head = kv_head * shared + (start + query) % shared;
                numbers[query] = projected + (row * (heads + 2 * step->kv_heads) + head) * dim;
                results[query] = outputs + (row * heads + head) * dim;
                last[query] = step->positions[row];
                own_slopes[query] = slopes ? slopes[head] : 0;
            }
            attend_together(step, numbers, together, last, slopes ? own_slopes : NULL,
                            step->tables + step->slots[first] * step->width, keys + kv_head * dim * step->size,
                            values + kv_head * dim, results);
        }
    }
}
