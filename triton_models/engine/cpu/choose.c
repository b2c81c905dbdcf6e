/* The choice of tokens: the most likely one, or the winner of the race of `../draw.py`. */

#include <omp.h>

#include "vectors.h"

/* What is drawn by. `keys`: [rows, 2], from `row_keys`. A temperature of 0: no draw. Where no row has limits,
`top_k` and what follows are NULL; see `kept` in `draw.py`. */
struct rules {
    const float *temperatures;
    const uint32_t *keys;
    const int64_t *top_k;
    const double *top_p, *min_p;
    int32_t *scratch; /* [threads, 3, vocabulary + LANES]: what `candidates` are written to */
};

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

typedef double dvec __attribute__((vector_size(8 * LANES)));

INLINE double total(dvec weights) {
    double all = 0;
    for (int lane = 0; lane < LANES; lane++) all += weights[lane];
    return all;
}

/* The row's logits from `at` on, in a vector of which only the row's end leaves lanes free: they are -inf. */
INLINE vec some(const float *numbers, int64_t at, int64_t vocabulary) {
    if (at + LANES <= vocabulary) return load(numbers + at);
    vec rest = splat(-INFINITY);
    for (int lane = 0; at + lane < vocabulary; lane++) rest[lane] = numbers[at + lane];
    return rest;
}

INLINE ivec lane_numbers(void) {
    ivec numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

/* Logits divided by the temperature, the largest 0. */
INLINE vec scaled(const float *numbers, int64_t at, int64_t vocabulary, float peak, float scale) {
    return (some(numbers, at, vocabulary) - peak) * scale;
}

/* How far these are below 0: the bits of their sizes, which are in the sizes' order. */
INLINE ivec distance(vec scaled) { return (ivec)scaled & 0x7fffffff; }

#define FARTHEST 0x7f7fffff /* the largest number's: farther are infinity and NaN */
#define REMOVED 0x7fffffff

/* Tokens that may remain, in order of their ids; what the last vector has beside them is removed.
`weights`: e to the power of the scaled logits. */
struct candidates {
    int32_t *far, *ids;
    float *weights;
    int64_t count;
};

/* Find the tokens that are not farther than `limit`; of the row's vectors, look at every `nth`. */
static void gather(struct candidates *these, int32_t limit, int nth, const float *numbers, int64_t vocabulary,
                   float peak, float scale) {
    these->count = 0;
    for (int64_t at = 0; at < vocabulary; at += nth * LANES) {
        vec here = scaled(numbers, at, vocabulary, peak, scale), weights = exponential(here);
        ivec far = distance(here), near = far <= limit;
        int64_t any = 0;
        for (int lane = 0; lane < LANES; lane++) any |= near[lane];
        if (any)
            for (int lane = 0; lane < LANES; lane++) {
                these->far[these->count] = far[lane];
                these->ids[these->count] = at + lane;
                these->weights[these->count] = weights[lane];
                these->count += near[lane] != 0;
            }
    }
    for (int lane = 0; lane < LANES; lane++) these->far[these->count + lane] = REMOVED;
}

/* How many are not farther than `limit`, and their weight. */
static int64_t within(const struct candidates *these, int32_t limit, double *weight) {
    ivec counts = {0};
    dvec weights = {0};
    for (int64_t at = 0; at < these->count; at += LANES) {
        ivec near = *(const ivec *)(these->far + at) <= limit;
        counts -= near;
        weights += __builtin_convertvector((vec)(near & (ivec)load(these->weights + at)), dvec);
    }
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
    *weight = total(weights);
    return count;
}

/* The least distance within which there are `count` tokens and this weight. */
static int32_t reach(const struct candidates *these, int64_t count, double weight) {
    int32_t limit = FARTHEST, short_of = -1;
    while (limit - short_of > 1) {
        int32_t middle = short_of + (limit - short_of) / 2;
        double found;
        if (within(these, middle, &found) >= count && found >= weight) limit = middle;
        else short_of = middle;
    }
    return limit;
}

/* Keep the nearest tokens: as few as are `count` and have this weight, of equal ones those of the lowest ids.
Returns the weight that is left. */
static double keep(struct candidates *these, int64_t count, double weight) {
    int32_t limit = reach(these, count, weight);
    double nearer, through;
    int64_t before = within(these, limit - 1, &nearer), equal = within(these, limit, &through) - before;
    double each = equal ? (through - nearer) / equal : 0;
    int64_t wanted = count - before;
    if (each > 0 && wanted < ceil((weight - nearer) / each)) wanted = ceil((weight - nearer) / each);
    if (wanted < 1) wanted = 1;
    for (int64_t at = 0, kept = 0; at < these->count; at++)
        if (these->far[at] > limit || (these->far[at] == limit && ++kept > wanted)) these->far[at] = REMOVED;
    return wanted < equal ? nearer + wanted * each : through;
}

/* The winner of the race between the tokens that min_p, then top_k, then top_p leave of a row. */
static int64_t winner_within(struct candidates these, int64_t top_k, double top_p, double min_p, const uint32_t *key,
                             const float *numbers, int64_t vocabulary, float peak, float scale) {
    int32_t limit = min_p > 0 ? distance(splat((float)log(min_p)))[0] : FARTHEST;
    int by_count = 0 < top_k && top_k < vocabulary;
    double whole = 0;
    if (top_p < 1 && !by_count) {
        dvec weights = {0};
        for (int64_t at = 0; at < vocabulary; at += LANES) {
            vec here = scaled(numbers, at, vocabulary, peak, scale);
            weights += __builtin_convertvector((vec)((distance(here) <= limit) & (ivec)exponential(here)), dvec);
        }
        whole = total(weights);
        /* All that weigh less than this together weigh less than half of what top_p leaves out: few are left. */
        int32_t few = distance(splat((float)log((1 - top_p) * whole / vocabulary / 2)))[0];
        if (few < limit) limit = few;
    }
    if (by_count) {
        /* The nearest of a part are no nearer than those of all, and few are as near. */
        gather(&these, limit, 16, numbers, vocabulary, peak, scale);
        if (top_k < these.count) limit = reach(&these, top_k, 0);
    }
    gather(&these, limit, 1, numbers, vocabulary, peak, scale);
    if (by_count) whole = keep(&these, top_k < these.count ? top_k : these.count, 0);
    if (top_p < 1) keep(&these, 1, top_p * whole);
    vec best = splat(-1.0f);
    ivec tokens = {0};
    for (int64_t at = 0; at < these.count; at += LANES) {
        ivec ids = *(const ivec *)(these.ids + at), left = *(const ivec *)(these.far + at) < REMOVED;
        vec found = load(these.weights + at) / exponential_numbers((uvec)ids, key);
        ivec more = left & (found > best);
        best = (vec)((more & (ivec)found) | (~more & (ivec)best));
        tokens = (more & ids) | (~more & tokens);
    }
    return place_of(best, tokens, &peak);
}

/* The winner of the race between all tokens of a row. */
INLINE int64_t winner(const uint32_t *key, const float *numbers, int64_t vocabulary, float peak, float scale) {
    vec best = splat(-1.0f);
    ivec tokens = {0};
    for (int64_t at = 0; at < vocabulary; at += LANES) {
        ivec ids = lane_numbers() + (int32_t)at;
        vec found = exponential(scaled(numbers, at, vocabulary, peak, scale)) / exponential_numbers((uvec)ids, key);
        ivec more = found > best;
        best = (vec)((more & (ivec)found) | (~more & (ivec)best));
        tokens = (more & ids) | (~more & tokens);
    }
    return place_of(best, tokens, &peak);
}

/* Choose a token of each row of `logits`, [rows, vocabulary]: the most likely one, or the winner of the race.

`status`: [3, rows], see `SamplerOutputs`. */
void choose(const float *logits, int64_t rows, int64_t vocabulary, const struct rules *rules, int64_t *status,
            int threads) {
#pragma omp parallel for num_threads(threads) if (rows * vocabulary > WORTH / 16)
    for (int64_t row = 0; row < rows; row++) {
        const float *numbers = logits + row * vocabulary;
        const uint32_t *key = rules->keys + 2 * row;
        ivec places = {0};
        vec best = splat(-INFINITY), zeros = {0};
        for (int64_t at = 0; at < vocabulary; at += LANES) {
            vec found = some(numbers, at, vocabulary);
            ivec more = found > best;
            best = (vec)((more & (ivec)found) | (~more & (ivec)best));
            places = (more & (lane_numbers() + (int32_t)at)) | (~more & places);
            if (at + LANES <= vocabulary) zeros += found * 0.0f; /* NaN of what is not finite */
        }
        float rest = 0, peak;
        for (int64_t at = vocabulary / LANES * LANES; at < vocabulary; at++) rest += numbers[at] * 0.0f;
        int64_t token = place_of(best, places, &peak);
        status[rows + row] = sum(zeros) + rest == 0;
        status[2 * rows + row] = peak > -INFINITY;
        if (rules->temperatures[row] > 0 && peak > -INFINITY && peak < INFINITY) {
            float scale = 1.0f / rules->temperatures[row];
            if (rules->top_k && (rules->top_k[row] > 0 || rules->top_p[row] < 1 || rules->min_p[row] > 0)) {
                int64_t room = vocabulary + LANES;
                int32_t *scratch = rules->scratch + 3 * room * omp_get_thread_num();
                struct candidates these = {scratch, scratch + room, (float *)(scratch + 2 * room), 0};
                token = winner_within(these, rules->top_k[row], rules->top_p[row], rules->min_p[row], key, numbers,
                                      vocabulary, peak, scale);
            } else
                token = winner(key, numbers, vocabulary, peak, scale);
        }
        status[row] = token;
    }
}
