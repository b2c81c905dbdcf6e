/* Products with a matrix [N, K], and norms.

A matrix is stored as [panels, K, 2, LANES]: a panel is LANES rows of its first half and as many of its second.
Halves are rounded up to whole panels, with zeros. With 4 bits, a byte holds a number of each half, the first
one's in its low bits: [panels, K, LANES]. */

#include "vectors.h"
#ifdef __AVX__
#include <immintrin.h>
#endif

#define PANEL (2 * LANES)
#define DEPTH 512 /* columns of a panel that stay in a cache while all rows are multiplied by them */
#define GROUP 128 /* weights of 4 bits that share a scale and a zero, as in `quantised.py` */
#define TILE 64 /* rows whose sums are kept meanwhile */

int lanes(void) { return LANES; }

/* What a matrix's numbers are; the values are those of `ops_cpu.py`. */
enum kind { FLOAT32, INT8, INT4, BFLOAT16, FLOAT16 };
static const int BYTES[] = {8, 2, 1, 4, 4}; /* of a pair of them: one of each half */

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

/* LANES numbers of 16 bits as integers. */
INLINE ivec widen_words(const char *numbers) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)numbers));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)numbers));
#else
    return __builtin_convertvector(*(const words *)numbers, ivec);
#endif
}

/* A bfloat16 is the upper half of a float32. */
INLINE vec load_bfloat16(const char *numbers) { return (vec)(widen_words(numbers) << 16); }

/* A float16 has fewer bits of the exponent. */
INLINE vec load_float16(const char *numbers) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)numbers));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)numbers));
#else
    ivec wide = widen_words(numbers), sign = (wide & 0x8000) << 16, size = (wide & 0x7fff) << 13;
    vec number = (vec)size * 0x1p112f;
    ivec not_finite = size >= 0x7c00 << 13;
    return (vec)(sign | (not_finite & (size | 0x7f800000)) | (~not_finite & (ivec)number));
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
    } else if (kind == BFLOAT16) {
        *first = load_bfloat16(panel + 2 * column * PANEL);
        *second = load_bfloat16(panel + 2 * (column * PANEL + LANES));
    } else if (kind == FLOAT16) {
        *first = load_float16(panel + 2 * column * PANEL);
        *second = load_float16(panel + 2 * (column * PANEL + LANES));
    } else {
        ivec pairs = widen(panel + column * LANES);
        *first = __builtin_convertvector(pairs & 15, vec);
        *second = __builtin_convertvector(pairs >> 4 & 15, vec);
    }
}

/* Add the products of `rows` inputs, which the compiler knows, and `depth` columns of a panel to `sums`. */
INLINE void multiply(const float *inputs, int64_t stride, const char *panel, int depth, const int kind, float *sums,
                     const int rows) {
    vec first[TOGETHER], second[TOGETHER];
    for (int row = 0; row < rows; row++)
        first[row] = load(sums + row * PANEL), second[row] = load(sums + row * PANEL + LANES);
    for (int at = 0; at < depth; at++) {
        vec a, b;
        load_column(panel, at, kind, &a, &b);
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
INLINE void multiply_rows(const float *inputs, int rows, int64_t stride, const char *panel, int depth, const int kind,
                          float *sums) {
    for (int row = 0; row < rows; row += TOGETHER) {
        const float *own = inputs + row * stride;
        float *results = sums + row * PANEL;
        switch (rows - row) {
        case 1: multiply(own, stride, panel, depth, kind, results, 1); break;
        case 2: multiply(own, stride, panel, depth, kind, results, 2); break;
        case 3: multiply(own, stride, panel, depth, kind, results, 3); break;
        case 4: multiply(own, stride, panel, depth, kind, results, 4); break;
        case 5: multiply(own, stride, panel, depth, kind, results, 5); break;
#if TOGETHER > 6
        case 6: multiply(own, stride, panel, depth, kind, results, 6); break;
        case 7: multiply(own, stride, panel, depth, kind, results, 7); break;
#endif
        default: multiply(own, stride, panel, depth, kind, results, TOGETHER);
        }
    }
}

static void multiply_floats(const float *inputs, int rows, int64_t stride, const char *panel, int depth, float *sums) {
    multiply_rows(inputs, rows, stride, panel, depth, FLOAT32, sums);
}

/* The same for a panel of bytes or of 4 bits. For more rows than are multiplied together, these become float32 once. */
INLINE void multiply_few_bits(const float *inputs, int rows, int64_t stride, const char *panel, int depth,
                              const int kind, float *sums) {
    if (rows <= TOGETHER) {
        multiply_rows(inputs, rows, stride, panel, depth, kind, sums);
        return;
    }
    float numbers[GROUP * PANEL] __attribute__((aligned(64)));
    for (int at = 0; at < depth; at += GROUP) {
        int found = depth - at < GROUP ? depth - at : GROUP;
        for (int column = 0; column < found; column++) {
            vec first, second;
            load_column(panel, at + column, kind, &first, &second);
            store(numbers + column * PANEL, first), store(numbers + column * PANEL + LANES, second);
        }
        multiply_floats(inputs + at, rows, stride, (const char *)numbers, found, sums);
    }
}

/* Give the products of a group their scales, and add them and the zeros' share to `sums`. */
static void add_group(const float *inputs, int rows, int depth, const struct matrix *matrix, int64_t group, int64_t panel,
                      const float *products, float *sums) {
    int64_t panels = (matrix->outputs + PANEL - 1) / PANEL;
    for (int row = 0; row < rows; row++) {
        const float *own = inputs + row * matrix->columns;
        vec totals = {0};
        int at = 0;
        for (; at + LANES <= depth; at += LANES) totals += load(own + at);
        float total = sum(totals);
        for (; at < depth; at++) total += own[at];
        for (int half = 0; half < 2; half++) {
            int64_t place = ((group * 2 + half) * panels + panel) * LANES;
            float *result = sums + row * PANEL + half * LANES;
            vec product = load(products + row * PANEL + half * LANES) * load(matrix->scales + place);
            store(result, load(result) + product + total * load(matrix->zeros + place));
        }
    }
}

/* Add the products of at most TILE rows and some columns, at most DEPTH, of a panel to `sums`: [rows, 2, LANES]. */
static void multiply_columns(const float *inputs, int rows, const struct matrix *matrix, int64_t panel, int64_t start,
                             int depth, float *sums) {
    int64_t columns = matrix->columns;
    const float *own = inputs + start;
    const char *numbers = matrix->numbers + (panel * columns + start) * LANES * BYTES[matrix->kind];
    if (matrix->kind == FLOAT32) {
        multiply_floats(own, rows, columns, numbers, depth, sums);
    } else if (matrix->kind == INT8) {
        multiply_few_bits(own, rows, columns, numbers, depth, INT8, sums);
    } else if (matrix->kind == BFLOAT16) {
        multiply_rows(own, rows, columns, numbers, depth, BFLOAT16, sums);
    } else if (matrix->kind == FLOAT16) {
        multiply_rows(own, rows, columns, numbers, depth, FLOAT16, sums);
    } else {
        for (int at = 0; at < depth; at += GROUP) {
            float products[TILE * PANEL] __attribute__((aligned(64)));
            int found = depth - at < GROUP ? depth - at : GROUP;
            memset(products, 0, sizeof(float) * rows * PANEL);
            multiply_few_bits(own + at, rows, columns, numbers + at * LANES, found, INT4, products);
            add_group(own + at, rows, found, matrix, (start + at) / GROUP, panel, products, sums);
        }
    }
}

/* What becomes of a product; the values are those of `ops_cpu.py`. */
enum activation { NONE, SWIGLU, GELU };

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

/* GELU in its form with tanh: x times half of 1 + tanh(z), which is 1 / (1 + e to the power of -2 z). */
INLINE vec gelu(vec x) { return x / (1.0f + exponential(x * (x * x * -0.0713548162726f - 1.5957691216057f))); }

/* Make results of the sums of a row and a panel. `added`: NULL, or of the row. */
static void finish(const struct matrix *matrix, int64_t panel, float *sums, const float *added, int activation,
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
        if (activation == GELU) store(own, gelu(load(own)));
        if (activation != SWIGLU && found > 0) memcpy(results + start, own, sizeof(float) * found);
    }
    if (activation == SWIGLU) store(results + panel * LANES, silu(load(sums)) * load(sums + LANES));
}

/* [rows, columns] times the transposed matrix.

`added`: NULL, or [rows, outputs], which is added. `activation`: of SWIGLU, silu(first half) * second half, the
result is [rows, outputs / 2]; outputs are whole panels then. */
void product(const float *inputs, int64_t rows, const struct matrix *matrix, const float *added, int activation,
             float *results, int threads) {
    int64_t outputs = matrix->outputs, columns = matrix->columns, width = activation == SWIGLU ? outputs / 2 : outputs;
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
                finish(matrix, panel, sums + each * PANEL, added ? added + (row + each) * width : NULL, activation,
                       results + (row + each) * width);
        }
}

/* silu(first half) * second half of [rows, 2 * width]: [rows, width]. */
void swiglu(const float *inputs, int64_t rows, int64_t width, float *results) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < width; at += LANES) {
            const float *first = inputs + row * 2 * width + at;
            int found = width - at < LANES ? width - at : LANES;
            float gate[LANES] = {0}, up[LANES] = {0};
            memcpy(gate, first, sizeof(float) * found), memcpy(up, first + width, sizeof(float) * found);
            store(gate, silu(load(gate)) * load(up));
            memcpy(results + row * width + at, gate, sizeof(float) * found);
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
