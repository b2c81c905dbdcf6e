/* A step's operations for CPUs, float32: `ops_cpu.py` compiles and calls them.

Each row of a step is one token. A tensor of torch's is a pointer to its first number; all are contiguous.
`threads`: how many may share the work. They are OpenMP's, and so torch's own. No row's result depends on the
rows beside it, or on their number.

A matrix [N, K] is stored as [panels, K, 2, LANES]: a panel is LANES rows of its first half and as many of its
second. Halves are rounded up to whole panels, with zeros. With 4 bits, a byte holds a number of each half, the
first one's in its low bits: [panels, K, LANES].

A block of the KV cache has as many numbers as `blocks.py` says, in an order of its own: keys are
[KV heads, head_dim, size], so that a vector holds one number each of LANES keys, and values are
[size, KV heads, head_dim].
*/

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* What one register holds, and how many rows' sums fit into the registers beside what they are made of. */
#if defined(__AVX512F__)
#define LANES 16
#define TOGETHER 8
#elif defined(__AVX__)
#define LANES 8
#define TOGETHER 6
#else
#define LANES 4
#define TOGETHER 6
#endif

#define PANEL (2 * LANES)
#define DEPTH 512 /* columns of a panel that stay in a cache while all rows are multiplied by them */
#define GROUP 128 /* weights of 4 bits that share a scale and a zero, as in `quantised.py` */
#define TILE 64 /* rows whose sums are kept meanwhile */
#define SPAN 128 /* keys whose scores exist at once, for each query */
#define QUERIES 4 /* queries that share what is read of keys and values */
#define WORTH 262144 /* multiplications that are worth a second thread */

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4)));

int lanes(void) { return LANES; }

INLINE vec load(const float *numbers) { return *(const vec *)numbers; }
INLINE void store(float *numbers, vec v) { *(vec *)numbers = v; }
INLINE vec splat(float number) { return number - (vec){0}; }

INLINE vec larger(vec a, vec b) { /* the second one if they cannot be compared */
    ivec first = a > b;
    return (vec)((first & (ivec)a) | (~first & (ivec)b));
}

INLINE float sum(vec v) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
}

/* e to the power of x, to 2e-7: 2 to the power of its whole part times a polynomial of the rest, which is
between -1/2 and 1/2 (the minimax one of degree 6). NaN stays NaN, and below e to the power of -87 is 0. */
INLINE vec exponential(vec x) {
    vec powers = larger(splat(-126.0f), x * 1.44269504088896341f);
    powers = -larger(splat(-127.0f), -powers);
    /* Rounded: the conversion cuts off what is behind the point, so all is made positive first. */
    ivec whole = __builtin_convertvector(powers + 128.5f, ivec) - 128;
    vec rest = powers - __builtin_convertvector(whole, vec);
    vec result = splat(0.000154035303933816f);
    result = result * rest + 0.00133335581464284f;
    result = result * rest + 0.00961812910762848f;
    result = result * rest + 0.0555041086648216f;
    result = result * rest + 0.240226506959101f;
    result = result * rest + 0.693147180559945f;
    result = result * rest + 1.0f;
    return (vec)((ivec)(result * (vec)((whole + 127) << 23)) & ~(x < -87.0f));
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

/* What a matrix's numbers are; the values are those of `ops_cpu.py`. */
enum kind { FLOAT32, INT8, INT4 };
static const int BYTES[] = {8, 2, 1}; /* of a pair of them: one of each half */

/* A matrix [outputs, columns]. One of bytes is numbers times scales, [outputs]; one of 4 bits is numbers from 0
to 15 times scales plus zeros, both [groups, outputs]: each GROUP columns of a row have their own. Scales and
zeros are there for whole panels. `bias`: NULL, or [outputs]. */
struct matrix {
    const char *numbers;
    const float *scales, *zeros, *bias;
    int64_t outputs, columns;
    int kind;
};

/* LANES bytes as numbers, for which gcc 12 by itself takes many instructions. */
INLINE ivec widen(const char *numbers) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)numbers));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)numbers));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const bytes *)numbers, shorts), ivec);
#endif
}

/* The numbers of a panel's column: of LANES rows of the first half, and of the second. */
INLINE void load_column(const char *panel, int64_t column, const int kind, vec *first, vec *second) {
    if (kind == FLOAT32) {
        *first = load((const float *)panel + column * PANEL);
        *second = load((const float *)panel + column * PANEL + LANES);
    } else if (kind == INT8) {
        *first = __builtin_convertvector(widen(panel + column * PANEL), vec);
        *second = __builtin_convertvector(widen(panel + column * PANEL + LANES), vec);
    } else {
        ivec pairs = widen(panel + column * LANES);
        *first = __builtin_convertvector(pairs & 15, vec);
        *second = __builtin_convertvector(pairs >> 4 & 15, vec);
    }
}

/* Add the products of `rows` inputs, which the compiler knows, and `depth` columns of a panel to `sums`. */
INLINE void multiply(const float *inputs, int64_t stride, const char *panel, int64_t start, int depth, const int kind,
                     float *sums, const int rows) {
    vec first[TOGETHER], second[TOGETHER];
    for (int row = 0; row < rows; row++)
        first[row] = load(sums + row * PANEL), second[row] = load(sums + row * PANEL + LANES);
    for (int at = 0; at < depth; at++) {
        vec a, b;
        load_column(panel, start + at, kind, &a, &b);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            float number = inputs[row * stride + at];
            first[row] += number * a, second[row] += number * b;
        }
    }
    for (int row = 0; row < rows; row++)
        store(sums + row * PANEL, first[row]), store(sums + row * PANEL + LANES, second[row]);
}

/* The same for any number of rows. */
INLINE void multiply_rows(const float *inputs, int rows, int64_t stride, const char *panel, int64_t start, int depth,
                          const int kind, float *sums) {
    for (int row = 0; row < rows; row += TOGETHER) {
        const float *own = inputs + row * stride;
        float *results = sums + row * PANEL;
        switch (rows - row) {
        case 1: multiply(own, stride, panel, start, depth, kind, results, 1); break;
        case 2: multiply(own, stride, panel, start, depth, kind, results, 2); break;
        case 3: multiply(own, stride, panel, start, depth, kind, results, 3); break;
        case 4: multiply(own, stride, panel, start, depth, kind, results, 4); break;
        case 5: multiply(own, stride, panel, start, depth, kind, results, 5); break;
#if TOGETHER > 6
        case 6: multiply(own, stride, panel, start, depth, kind, results, 6); break;
        case 7: multiply(own, stride, panel, start, depth, kind, results, 7); break;
#endif
        default: multiply(own, stride, panel, start, depth, kind, results, TOGETHER);
        }
    }
}

/* Give the products of a group their scales, and add them and the zeros' share to `sums`. */
static void add_group(const float *inputs, int rows, int64_t stride, int depth, const struct matrix *matrix,
                      int64_t group, int64_t panel, const float *products, float *sums) {
    int64_t panels = (matrix->outputs + PANEL - 1) / PANEL;
    for (int half = 0; half < 2; half++) {
        int64_t place = (group * 2 + half) * panels * LANES + panel * LANES;
        vec scales = load(matrix->scales + place), zeros = load(matrix->zeros + place);
        for (int row = 0; row < rows; row++) {
            const float *own = inputs + row * stride;
            vec totals = {0};
            int at = 0;
            for (; at + LANES <= depth; at += LANES) totals += load(own + at);
            float total = sum(totals);
            for (; at < depth; at++) total += own[at];
            float *result = sums + row * PANEL + half * LANES;
            store(result, load(result) + load(products + row * PANEL + half * LANES) * scales + total * zeros);
        }
    }
}

/* Add the products of at most TILE rows and `depth` columns of a panel to `sums`.

Of more rows than are multiplied together, the numbers of bytes and bits become float32 once for all. */
INLINE void multiply_part(const float *inputs, int rows, int64_t stride, const char *panel, int64_t start, int depth,
                          const int kind, float *sums) {
    if (rows <= TOGETHER) {
        multiply_rows(inputs + start, rows, stride, panel, start, depth, kind, sums);
        return;
    }
    float numbers[GROUP * PANEL] __attribute__((aligned(64)));
    for (int at = 0; at < depth; at += GROUP) {
        int found = depth - at < GROUP ? depth - at : GROUP;
        for (int column = 0; column < found; column++) {
            vec first, second;
            load_column(panel, start + at + column, kind, &first, &second);
            store(numbers + column * PANEL, first), store(numbers + column * PANEL + LANES, second);
        }
        multiply_rows(inputs + start + at, rows, stride, (const char *)numbers, 0, found, FLOAT32, sums);
    }
}

/* Add the products of at most TILE rows and some columns, at most DEPTH, of a panel to `sums`: [rows, 2, LANES]. */
static void multiply_columns(const float *inputs, int rows, const struct matrix *matrix, int64_t panel, int64_t start,
                             int depth, float *sums) {
    int64_t columns = matrix->columns;
    const char *numbers = matrix->numbers + panel * columns * LANES * BYTES[matrix->kind];
    if (matrix->kind == FLOAT32) {
        multiply_rows(inputs + start, rows, columns, numbers, start, depth, FLOAT32, sums);
    } else if (matrix->kind == INT8) {
        multiply_part(inputs, rows, columns, numbers, start, depth, INT8, sums);
    } else {
        for (int64_t at = start; at < start + depth; at += GROUP) {
            float products[TILE * PANEL] __attribute__((aligned(64)));
            int found = start + depth - at < GROUP ? start + depth - at : GROUP;
            memset(products, 0, sizeof(float) * rows * PANEL);
            multiply_part(inputs, rows, columns, numbers, at, found, INT4, products);
            add_group(inputs + at, rows, columns, found, matrix, at / GROUP, panel, products, sums);
        }
    }
}

/* Make results of the sums of a row and a panel. `added`: NULL, or of the row. */
static void finish(const struct matrix *matrix, int64_t panel, float *sums, const float *added, int gated,
                   float *results) {
    int64_t outputs = matrix->outputs, panels = (outputs + PANEL - 1) / PANEL;
    for (int half = 0; half < 2; half++) {
        int64_t start = (half * panels + panel) * LANES;
        int found = outputs - start < LANES ? outputs - start : LANES;
        float *own = sums + half * LANES;
        if (matrix->kind == INT8) store(own, load(own) * load(matrix->scales + start));
        for (int lane = 0; lane < found; lane++) {
            if (matrix->bias) own[lane] += matrix->bias[start + lane];
            if (added) own[lane] += added[start + lane];
        }
        if (!gated && found > 0) memcpy(results + start, own, sizeof(float) * found);
    }
    if (gated) store(results + panel * LANES, silu(load(sums)) * load(sums + LANES));
}

/* [rows, columns] times the transposed matrix.

`added`: NULL, or [rows, outputs], which is added. `gated`: the result is silu(first half) * second half,
[rows, outputs / 2]; outputs are whole panels then. */
void product(const float *inputs, int64_t rows, const struct matrix *matrix, const float *added, int gated,
             float *results, int threads) {
    int64_t outputs = matrix->outputs, columns = matrix->columns, width = gated ? outputs / 2 : outputs;
#pragma omp parallel for num_threads(threads) if (rows * columns * outputs > WORTH)
    for (int64_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
        for (int64_t row = 0; row < rows; row += TILE) {
            float sums[TILE * PANEL] __attribute__((aligned(64)));
            int count = rows - row < TILE ? rows - row : TILE;
            memset(sums, 0, sizeof(float) * count * PANEL);
            for (int64_t at = 0; at < columns; at += DEPTH)
                multiply_columns(inputs + row * columns, count, matrix, panel, at,
                                 columns - at < DEPTH ? columns - at : DEPTH, sums);
            for (int each = 0; each < count; each++)
                finish(matrix, panel, sums + each * PANEL, added ? added + (row + each) * width : NULL, gated,
                       results + (row + each) * width);
        }
}

/* RMSNorm of [rows, width], width a multiple of LANES. */
void rms_norm(const float *inputs, int64_t rows, int64_t width, const float *weight, float epsilon,
              float *outputs, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > WORTH)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = inputs + row * width;
        vec squares = {0};
        for (int64_t at = 0; at < width; at += LANES) squares += load(numbers + at) * load(numbers + at);
        float scale = 1.0f / sqrtf(sum(squares) / width + epsilon);
        for (int64_t at = 0; at < width; at += LANES)
            store(outputs + row * width + at, load(numbers + at) * scale * load(weight + at));
    }
}

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

/* The natural logarithm of x in (0, 1], to 1e-7: as in Moshier's Cephes, logf. */
INLINE vec logarithm(vec x) {
    ivec bits = (ivec)x, exponent = (bits >> 23) - 126;
    vec rest = (vec)((bits & 0x007fffff) | 0x3f000000); /* from 1/2 to 1 */
    ivec small = rest < 0.707106781186547524f;
    exponent += small;
    rest += (vec)(small & (ivec)rest) - 1.0f;
    vec square = rest * rest, result = splat(7.0376836292e-2f), whole = __builtin_convertvector(exponent, vec);
    result = result * rest - 1.1514610310e-1f;
    result = result * rest + 1.1676998740e-1f;
    result = result * rest - 1.2420140846e-1f;
    result = result * rest + 1.4249322787e-1f;
    result = result * rest - 1.6668057665e-1f;
    result = result * rest + 2.0000714765e-1f;
    result = result * rest - 2.4999993993e-1f;
    result = result * rest + 3.3333331174e-1f;
    result = result * rest * square - 2.12194440e-4f * whole - 0.5f * square;
    return rest + result + 0.693359375f * whole;
}

/* Exponentially distributed numbers of tokens: `exponentials` in `draw.py`. */
INLINE vec exponential_numbers(uvec ids, const uint32_t *key) {
    uvec numbers = ids * 0x9E3779B9u + key[0];
    numbers ^= numbers >> 16;
    numbers *= 0x85EBCA6Bu;
    numbers ^= numbers >> 13;
    numbers += key[1];
    numbers *= 0xC2B2AE35u;
    numbers ^= numbers >> 16;
    /* log1p of minus a number from 0 to 1; what 1 plus it is rounded by is divided out again. */
    vec x = (__builtin_convertvector(numbers, vec) + 0.5f) * -((1.0f - 0x1p-24f) * 0x1p-32f), one = 1.0f + x;
    ivec nothing = one == 1.0f;
    vec logarithms = logarithm(one) * (x / (one - 1.0f));
    return -(vec)((nothing & (ivec)x) | (~nothing & (ivec)logarithms));
}

/* The first of the places of the largest number, which becomes `most`. */
INLINE int64_t place_of(vec numbers, ivec places, float *most) {
    int best = 0;
    for (int lane = 1; lane < LANES; lane++)
        if (numbers[lane] > numbers[best] || (numbers[lane] == numbers[best] && places[lane] < places[best])) best = lane;
    *most = numbers[best];
    return places[best];
}

/* Choose a token of each row of `logits`, [rows, vocabulary]: the most likely one at temperature 0, or the winner
of the race of `draw.py`, of all tokens.

`keys`: [rows, 2], from `row_keys`. `status`: [3, rows], see `SamplerOutputs`. */
void choose(const float *logits, int64_t rows, int64_t vocabulary, const float *temperatures, const uint32_t *keys,
            int64_t *status, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * vocabulary > WORTH / 16)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = logits + row * vocabulary;
        float rest[LANES], most;
        int64_t whole = vocabulary / LANES * LANES;
        for (int lane = 0; lane < LANES; lane++) rest[lane] = whole + lane < vocabulary ? numbers[whole + lane] : -INFINITY;
        ivec lane_numbers, places = {0};
        for (int lane = 0; lane < LANES; lane++) lane_numbers[lane] = lane;
        vec best = splat(-INFINITY), zeros = {0};
        for (int64_t at = 0; at < vocabulary; at += LANES) {
            vec found = load(at < whole ? numbers + at : rest);
            ivec more = found > best;
            best = (vec)((more & (ivec)found) | (~more & (ivec)best));
            places = (more & (lane_numbers + (int32_t)at)) | (~more & places);
            if (at < whole) zeros += found * 0.0f; /* NaN of what is not finite */
        }
        float kept = 0;
        for (int64_t at = whole; at < vocabulary; at++) kept += numbers[at] * 0.0f;
        int64_t token = place_of(best, places, &most);
        status[rows + row] = sum(zeros) + kept == 0;
        status[2 * rows + row] = most > -INFINITY;
        if (temperatures[row] > 0 && most > -INFINITY && most < INFINITY) {
            float scale = 1.0f / temperatures[row];
            best = splat(-1.0f);
            for (int64_t at = 0; at < vocabulary; at += LANES) {
                ivec ids = lane_numbers + (int32_t)at;
                vec found = exponential((load(at < whole ? numbers + at : rest) - most) * scale);
                found /= exponential_numbers((uvec)ids, keys + 2 * row);
                ivec more = found > best;
                best = (vec)((more & (ivec)found) | (~more & (ivec)best));
                places = (more & ids) | (~more & places);
            }
            token = place_of(best, places, &most);
        }
        status[row] = token;
    }
}
