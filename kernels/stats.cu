// Comparison of the token rows of checkpoints with a reference on the device: what src/compare computes on the
// host, so that of a large prefill 88 bytes a row come back instead of the row. Beside it, rows that are asked for
// are put where few copies bring them to the host.
//
// Launch: ⌈T / rows of a block⌉ blocks for each pair, one pair after another; 128 threads. A row goes to half a warp, a wide
// one to a warp, a very wide one to a block. Blocks are small and soon over because they run in what kernels that compute
// leave of a multiprocessor, and those wait for room.
// Sums in f64: each lane those of its columns, eight at a time, then a tree of shuffles, in a fixed order. ggml has
// no such thing.
//
// What is bound by memory must not wait for arithmetic: f64 is where it changes a result. Sums are of f64 products
// and differences. Whether a > b and whether they differ f32 tells. The maxima are those of f64, but only few columns
// can have them:
// - f32 rounds the difference, and rounding is monotone: the largest f64 difference is among those of the largest
//   f32 difference, which are looked at again in f64.
// - |a - b|·(1/|b|) in f32 is the ratio but for 2^-22 of it (a rounding of the difference, one of the product, and an
//   ulp of the inverse), so that the largest lies among those within RATIO_MARGIN of the largest estimate.
// Both hold where no difference overflows, no inverse is subnormal, and the largest estimate does not overflow. (None
// that counts is subnormal: two numbers that differ do so by at least 2^-25 of either.) Where that is not so, which the
// sums of squares and the estimate itself tell, rows are compared again with care, as are rows that have NaN or
// infinities, whose squares are no finite sum, and rows whose eights do not begin at multiples of 16 bytes.
#include "row_stats.cuh"

struct StatsPair {
    const void* a;      // (T, W), the candidate: f32, or f16
    const float* b;     // (T, W), the reference
    const int* places;  // (T,): at which row of `shown` a row is to be put, or -1; null: none
    void* shown;        // (n, W), as a
    int width;          // W
    int a_f16;
    int lanes;          // of a row: 16, 32 or 128
    int first_block;    // those of its rows begin there
};

struct StatsArgs {
    RowStats* out;       // (pairs, T)
    int rows;            // T
    int pairs;
    StatsPair pair[6];
};

// What a row goes to, in lanes.
enum { HALF_WARP = 16, WARP = 32, BLOCK = 128 };
// Squares that sum up to less are of numbers below 2^126: no difference overflows, and no inverse is subnormal.
#define SQUARES_MAX 0x1p252
// Twice the error of an estimated ratio, as two of them have it, two times over.
#define RATIO_MARGIN (1.0f - 0x1p-20f)

DEVICE bool finite(float x) { return fabsf(x) < INFINITY_F; }

// 1/|x| but for an ulp; infinite where x is 0 or subnormal, 0 where the inverse would be.
DEVICE float inverse(float x) {
#ifdef CUDA_ON_HOST
    return fabsf(x) < 0x1p-126f ? INFINITY_F : fabsf(x) > 0x1p126f ? 0.0f : 1.0f / fabsf(x);
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fabsf(x)));
    return y;
#endif
}
// |d| / |b| likewise. NaN for 0/0.
DEVICE float estimated_ratio(float d, float b) { return fabsf(d) * inverse(b); }

// The largest of what a lane has seen, and in which of its stretches, a bit each, all that comes near it lies.
struct Peak {
    float value;
    uint32_t stretches;
};

// `margin` times a value is what comes near it.
DEVICE void note(Peak* peak, float value, float margin, uint32_t stretch) {
    if (value * margin > peak->value) peak->stretches = 0;
    if (value >= peak->value * margin) peak->stretches |= stretch;
    peak->value = fmaxf(peak->value, value);
}

// Eight values as they lie in memory, at a multiple of 16 bytes.
template <class S>
struct Octet;
template <>
struct alignas(16) Octet<half_t> {
    Words4 w;
    DEVICE float at(int j) const { return j % 2 == 0 ? low_half(w.v[j / 2]) : high_half(w.v[j / 2]); }
};
template <>
struct alignas(16) Octet<float> {
    Float4 f[2];
    DEVICE float at(int j) const { return f[j / 4].v[j % 4]; }
};
template <class S>
struct Piece {
    Octet<S> a;
    Octet<float> b;
};

// One row of a pair. Pieces of eight columns go to its lanes by turns.
template <class S>
struct Row {
    const S* a;
    const float* b;
    int width;
    int lane;
    int lanes;
    bool regular;  // whether pieces are whole and begin at multiples of 16 bytes

    DEVICE int column(int piece) const { return (piece * lanes + lane) * 8; }
    DEVICE bool has(int piece) const { return column(piece) < width; }
    DEVICE Piece<S> load(int piece) const {
        const int i = column(piece);
        return {*(const Octet<S>*)(a + i), *(const Octet<float>*)(b + i)};
    }
    // A stretch has 2^n pieces, so many that a row has 32 stretches at most: n.
    DEVICE int stretch_log() const {
        int n = 0;
        while ((32 * 8 * lanes << n) < width) n++;
        return n;
    }
};

// What a lane has of a row, each pair looked at. The order of the sums is that of `see_all`, so that they do not
// depend on what else is in the warp.
template <class S>
DEVICE RowStats careful_stats(const Row<S>& row) {
    RowStats s = no_stats(row.width);
    Fraction ratio = {0.0, 1.0};
    for (int start = row.column(0); start < row.width; start += 8 * row.lanes) {
        for (int i = start; i < start + 8 && i < row.width; i++) {
            const float x = to_float(row.a[i]), y = row.b[i];
            s.nonfinite_a += !finite(x);
            s.nonfinite_b += !finite(y);
            if (!finite(x) || !finite(y)) continue;
            add_sums(&s, x, y);
            add_max(&s, x, y, i);
            add_ratio(&ratio, x, y);
            s.positive += x > y;
            s.differing += x != y;
        }
    }
    s.ratio = ratio.over / ratio.under;
    return s;
}

// What a lane has seen of its row: sums, counts (of fewer than 2^24 columns) and where the maxima lie.
struct Seen {
    RowStats sums;
    float positive, differing;
    Peak most, ratio;
};

template <class S>
DEVICE void see(Seen* seen, const Piece<S>& p, uint32_t stretch) {
    float largest = 0.0f, estimate = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float x = p.a.at(j), y = p.b.at(j), d = x - y;
        largest = fmaxf(largest, fabsf(d));
        estimate = fmaxf(estimate, estimated_ratio(d, y));
        seen->positive += x > y ? 1.0f : 0.0f;
        seen->differing += x != y ? 1.0f : 0.0f;
        add_sums(&seen->sums, x, y);
    }
    note(&seen->most, largest, 1.0f, stretch);
    note(&seen->ratio, estimate, RATIO_MARGIN, stretch);
}

// All pieces of a lane; the next one is on its way while one is seen.
template <class S>
DEVICE Seen see_all(const Row<S>& row) {
    Seen seen = {no_stats(row.width)};
    const int stretch_log = row.stretch_log();
    Piece<S> even = {}, odd = {};
    if (row.has(0)) even = row.load(0);
    for (int piece = 0; row.has(piece); piece += 2) {
        if (row.has(piece + 1)) odd = row.load(piece + 1);
        see(&seen, even, 1u << (piece >> stretch_log));
        if (!row.has(piece + 1)) break;
        if (row.has(piece + 2)) even = row.load(piece + 2);
        see(&seen, odd, 1u << (piece + 1 >> stretch_log));
    }
    return seen;
}

// Puts the lanes of a row that are in this warp together: calls `merge(distance)` for lanes so far away, over and over.
template <class F>
DEVICE void over_lanes(int lanes, F merge) {
    if (lanes >= WARP) merge(HALF_WARP);
#pragma unroll
    for (int d = HALF_WARP / 2; d > 0; d /= 2) merge(d);
}

// The largest of the lanes of a row that are in this warp.
DEVICE float row_max(float x, int lanes) {
    over_lanes(lanes, [&](int distance) { x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance)); });
    return x;
}

// Calls `look(x, y, column)` for all columns of the stretches that a peak lies in: mostly eight.
template <class S, class F>
DEVICE void look_again(const Row<S>& row, const Peak& peak, F look) {
    const int pieces = 1 << row.stretch_log();
    int piece = 0;
#pragma unroll 1
    for (uint32_t left = peak.stretches; left != 0; left >>= 1) {
        const int end = piece + pieces;
        if (left % 2 == 0) piece = end;
#pragma unroll 1
        for (; piece < end; piece++) {
            if (!row.has(piece)) continue;
            const Piece<S> p = row.load(piece);
#pragma unroll
            for (int j = 0; j < 8; j++) look(p.a.at(j), p.b.at(j), row.column(piece) + j);
        }
    }
}

// Adds the maximum and the ratio, where a lane may have them, to its sums. Whether the ratio is right: for certain it is
// where the largest estimate is a normal number, or there is a division by zero.
template <class S>
DEVICE bool add_peaks(RowStats* s, const Row<S>& row, const Peak& most, const Peak& ratio) {
    const float largest = row_max(most.value, row.lanes), near = row_max(ratio.value, row.lanes) * RATIO_MARGIN;
    if (!(largest > 0.0f)) {  // equal rows
        const int i = row.column(0);
        if (row.lane % WARP % row.lanes == 0 && i < row.width) add_max(s, to_float(row.a[i]), row.b[i], i);
        return true;
    }
    if (most.value == largest) {
        look_again(row, most, [&](float x, float y, int i) {
            if (fabsf(x - y) == largest) add_max(s, x, y, i);
        });
    }
    bool right = true;
    if (ratio.value >= near) {
        Fraction exact = {0.0, 1.0};
        look_again(row, ratio, [&](float x, float y, int) {
            const float estimate = estimated_ratio(x - y, y);
            if (!(estimate >= near)) return;
            add_ratio(&exact, x, y);
            right &= y == 0.0f || estimate < INFINITY_F;
        });
        s->ratio = exact.over / exact.under;
    }
    return right;
}

// What the lanes of a warp have of a row, in that lane which has the maximum: whether this is it. A maximum of -1 is that of
// no pair. Both halves of a warp come here together: shuffles are for all 32 lanes, and what one half has to do with care
// the other does so too.
template <class S>
DEVICE bool row_stats(const Row<S>& row, RowStats* s) {
    bool right = false;
    if (row.regular) {
        const Seen seen = see_all(row);
        *s = seen.sums;
        s->positive = (uint32_t)seen.positive;
        s->differing = (uint32_t)seen.differing;
        const bool fits = s->squared_a + s->squared_b < SQUARES_MAX;
        right = add_peaks(s, row, seen.most, seen.ratio) && fits;
    }
    const bool careful = __ballot_sync(FULL_WARP, !right) != 0;
    if (careful) *s = careful_stats(row);
    int column = (int)s->column;
    over_lanes(row.lanes, [&](int distance) { merge(s, &column, careful, distance); });
    return column == s->column && (column < row.width || row.lane % WARP % row.lanes == 0);
}

// What the warps of a block have of a very wide row.
struct StatsParts {
    RowStats of[BLOCK / WARP];
};

template <class S>
DEVICE void compare_pair(const StatsPair& pair, int rows, RowStats* out) {
    SHARED(StatsParts, parts);
    const int lanes = pair.lanes, lane = threadIdx.x % lanes;  // the same number for the whole block
    const int asked = (blockIdx.x - pair.first_block) * (BLOCK / lanes) + threadIdx.x / lanes;
    const int t = asked < rows ? asked : rows - 1;  // lanes behind the last row help with it, and store nothing
    const int64_t start = (int64_t)t * pair.width;
    const S* const a = (const S*)pair.a + start;
    const float* const b = pair.b + start;
    // The same for all rows, and so for the whole warp.
    const bool regular = pair.width % 8 == 0 && (((int64_t)pair.a | (int64_t)pair.b) & 15) == 0;
    const Row<S> row = {a, b, pair.width, lane, lanes, regular};
    RowStats s;
    bool stores = row_stats(row, &s);
    if (lanes == BLOCK) {
        if (stores) parts.of[threadIdx.x / WARP] = s;
        __syncthreads();
        stores = threadIdx.x == 0;
        if (stores) {
            s = parts.of[0];
#pragma unroll 1
            for (int i = 1; i < BLOCK / WARP; i++) add_stats(&s, parts.of[i]);
        }
    }
    if (asked >= rows) return;
    if (s.max < 0) s.max = 0;
    if (stores) out[t] = s;
    const int place = pair.places == nullptr ? -1 : pair.places[t];
    if (place < 0) return;
    S* const shown = (S*)pair.shown + (int64_t)place * pair.width;
    const int64_t bytes = (int64_t)pair.width * sizeof(S);
    if ((((int64_t)a | (int64_t)shown | bytes) & 15) == 0) {
#pragma unroll 4
        for (int i = lane; i < bytes / 16; i += lanes) ((Float4*)shown)[i] = ((const Float4*)a)[i];
        return;
    }
    for (int i = lane; i < pair.width; i += lanes) shown[i] = a[i];
}

DEVICE void compare_rows(const StatsArgs& args) {
    int index = args.pairs - 1;
    while (index > 0 && (int)blockIdx.x < args.pair[index].first_block) index--;
    const StatsPair& pair = args.pair[index];
    RowStats* const out = args.out + (int64_t)index * args.rows;
    if (pair.a_f16) compare_pair<half_t>(pair, args.rows, out);
    else compare_pair<float>(pair, args.rows, out);
}

KERNEL_SIZED(stats_rows, StatsArgs, BLOCK, 5, compare_rows)
