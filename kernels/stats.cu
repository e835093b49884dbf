// Comparison of the token rows of checkpoints with a reference on the device: what src/compare computes on the
// host, so that of a large prefill 96 bytes a row come back instead of the row. Beside it, rows that are asked for
// are put where few copies bring them to the host.
//
// Launch: grid (⌈T·parts / 8⌉ of the pair that has most, pairs), 128 threads. A row of a pair goes to a half warp; a wide
// one to all eight of a block, part by part, whose numbers are put together in their order. Blocks are small and soon over
// because they run in what kernels that compute leave of a multiprocessor, and those wait for room.
// Sums in f64: each lane those of its columns, eight at a time, then a tree of shuffles, in a fixed order. ggml has
// no such thing.
//
// What is bound by memory must not wait for arithmetic: f64 is where it changes a result. Sums are of f64 products
// and differences. Whether a > b and whether they differ f32 tells. The maxima are those of f64, but only few columns
// can have them:
// - f32 rounds the difference, and rounding is monotone: the largest f64 difference is among those of the largest
//   f32 difference, which are computed again in f64.
// - |a - b|·(1/|b|) in f32 is the ratio but for 2^-22 of it (a rounding of the difference, one of the product, and an
//   ulp of the inverse), so that the largest lies among those within RATIO_MARGIN of the largest estimate.
// Both hold where no difference overflows, no inverse is subnormal, and the largest estimate does not overflow. (None
// that counts is subnormal: two numbers that differ do so by at least 2^-25 of either.) Where that is not so, which the
// sums of squares and the estimate itself tell, rows are compared again with care, as are rows that have NaN or
// infinities, whose squares are no finite sum, and rows whose eights do not begin at multiples of 16 bytes.
#include "common.cuh"

// One row. Sums, the maxima and the counts of signs leave out pairs that are not two finite numbers.
struct RowStats {
    double abs_error;        // Σ |a - b|
    double squared_error;    // Σ (a - b)²
    double squared_a;        // Σ a²
    double squared_b;        // Σ b²
    double product;          // Σ a·b
    double max;              // max |a - b|, 0 where no pair differs
    double ratio;            // max |a - b| / |b|, 0/0 counting as nothing
    int64_t column;          // the lowest one with the maximum, of a and b:
    float a, b;
    uint32_t positive;       // how often a > b
    uint32_t differing;      // how often a and b differ
    uint32_t nonfinite_a, nonfinite_b;
};

struct StatsPair {
    const void* a;      // (T, W), the candidate: f32, or f16
    const float* b;     // (T, W), the reference
    const int* places;  // (T,): at which row of `shown` a row is to be put, or -1; null: none
    void* shown;        // (n, W), as a
    int width;          // W
    int a_f16;
};

struct StatsArgs {
    RowStats* out;       // (pairs, T)
    int rows;            // T
    int pairs;
    StatsPair pair[6];
};

// Lanes of a row or a part of one, and how many of these a block has; columns from which on a row is taken in parts.
enum { ROW_LANES = 16, BLOCK_PARTS = 8, WIDE_ROW = 2048 };
// Squares that sum up to less are of numbers below 2^126: no difference overflows, and no inverse is subnormal.
#define SQUARES_MAX 0x1p252
// Twice the error of an estimated ratio, as two of them have it, four times over.
#define RATIO_MARGIN (1.0f - 0x1p-19f)

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

// The largest of what a lane has seen, and in which of its pieces of eight columns all that comes near it lies.
struct Peak {
    float value;
    int from, to;
};

// `margin` times a value is what comes near it.
DEVICE void note(Peak* peak, float value, float margin, int piece) {
    if (value * margin > peak->value) peak->from = piece;
    if (value >= peak->value * margin) peak->to = piece;
    peak->value = fmaxf(peak->value, value);
}

// Eight values as they lie in memory, at a multiple of 16 bytes.
template <class S>
struct Octet;
template <>
struct alignas(16) Octet<half_t> {
    Half8 h;
    DEVICE float at(int j) const { return to_float(h.v[j]); }
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

// One row of a pair, or one of its parts. Pieces of eight columns go to parts and their lanes by turns.
template <class S>
struct Row {
    const S* a;
    const float* b;
    int width;
    int lane;      // among those of all parts
    int lanes;     // of all parts
    bool regular;  // whether pieces are whole and begin at multiples of 16 bytes

    DEVICE int column(int piece) const { return (piece * lanes + lane) * 8; }
    DEVICE Piece<S> load(int piece) const {
        const int i = column(piece);
        return {*(const Octet<S>*)(a + i), *(const Octet<float>*)(b + i)};
    }
};

DEVICE void add_sums(RowStats* s, float x, float y) {
    const double a = x, b = y, error = a - b;
    s->abs_error += fabs(error);
    s->squared_error += error * error;
    s->squared_a += a * a;
    s->squared_b += b * b;
    s->product += a * b;
    s->positive += x > y;
    s->differing += x != y;
}

// The maximum and the ratio with one more pair of finite numbers.
DEVICE void add_maxima(RowStats* s, float x, float y, int column) {
    const double size = fabs((double)x - y);
    if (size > s->max) {
        s->max = size;
        s->column = column;
        s->a = x;
        s->b = y;
    }
    const double ratio = size > 0 ? size / (double)fabsf(y) : 0.0;
    if (ratio > s->ratio) s->ratio = ratio;
}

DEVICE RowStats no_stats(int width) {
    RowStats s = {};
    s.max = -1.0;  // of nothing
    s.column = width;
    return s;
}

// What a lane has of a row, each pair looked at. The order of the sums is that of `sums_of`, so that they do not
// depend on what else is in the warp.
template <class S>
DEVICE RowStats careful_stats(const Row<S>& row) {
    RowStats s = no_stats(row.width);
    for (int start = row.column(0); start < row.width; start += 8 * row.lanes) {
        for (int i = start; i < start + 8 && i < row.width; i++) {
            const float x = to_float(row.a[i]), y = row.b[i];
            s.nonfinite_a += !finite(x);
            s.nonfinite_b += !finite(y);
            if (!finite(x) || !finite(y)) continue;
            add_sums(&s, x, y);
            add_maxima(&s, x, y, i);
        }
    }
    return s;
}

// The sums of a lane, and near which pieces its maxima lie.
template <class S>
DEVICE RowStats sums_of(const Row<S>& row, Peak* most, Peak* ratio) {
    RowStats s = no_stats(row.width);
    Piece<S> next = {};
    if (row.column(0) < row.width) next = row.load(0);
    for (int piece = 0; row.column(piece) < row.width; piece++) {
        const Piece<S> p = next;
        if (row.column(piece + 1) < row.width) next = row.load(piece + 1);  // on its way while this one is added
        float largest = 0.0f, estimate = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = p.a.at(j), y = p.b.at(j), d = x - y;
            largest = fmaxf(largest, fabsf(d));
            estimate = fmaxf(estimate, estimated_ratio(d, y));
            add_sums(&s, x, y);
        }
        note(most, largest, 1.0f, piece);
        note(ratio, estimate, RATIO_MARGIN, piece);
    }
    return s;
}

// The largest of the lanes of a row.
DEVICE float row_max(float x) {
#pragma unroll
    for (int d = ROW_LANES / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, d));
    return x;
}

// Adds the columns of a lane that are at least as near a peak as `value`: mostly one. Whether the ratio is right then:
// not where an estimate overflows.
template <class S>
DEVICE bool add_near(RowStats* s, const Row<S>& row, const Peak& peak, float value, bool is_ratio) {
    bool right = true;
    for (int piece = peak.from; piece <= peak.to; piece++) {
        const Piece<S> p = row.load(piece);
        uint32_t near = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float y = p.b.at(j), d = p.a.at(j) - y;
            near |= (uint32_t)((is_ratio ? estimated_ratio(d, y) : fabsf(d)) >= value) << j;
        }
#pragma unroll 1
        for (int i = row.column(piece); near != 0; i++, near >>= 1) {
            if (near % 2 == 0) continue;
            const float x = to_float(row.a[i]), y = row.b[i];
            add_maxima(s, x, y, i);
            right &= !is_ratio || y == 0.0f || estimated_ratio(x - y, y) < INFINITY_F;
        }
    }
    return right;
}

// Adds the maximum and the ratio, where a lane may have them, to its sums. Whether the ratio is right: for certain it is
// where the largest estimate is a normal number, or there is a division by zero.
template <class S>
DEVICE bool add_peaks(RowStats* s, const Row<S>& row, const Peak& most, const Peak& ratio) {
    const float largest = row_max(most.value), near = row_max(ratio.value) * RATIO_MARGIN;
    if (!(largest > 0.0f)) {  // equal rows
        const int i = row.column(0);
        if (row.lane % ROW_LANES == 0) add_maxima(s, to_float(row.a[i]), row.b[i], i);
        return true;
    }
    if (most.value == largest) add_near(s, row, most, largest, false);
    return ratio.value >= near ? add_near(s, row, ratio, near, true) : true;
}

// What is known of other columns of the same row put to it.
DEVICE void add_stats(RowStats* s, const RowStats& other) {
    s->abs_error += other.abs_error;
    s->squared_error += other.squared_error;
    s->squared_a += other.squared_a;
    s->squared_b += other.squared_b;
    s->product += other.product;
    s->positive += other.positive;
    s->differing += other.differing;
    s->nonfinite_a += other.nonfinite_a;
    s->nonfinite_b += other.nonfinite_b;
    if (other.ratio > s->ratio) s->ratio = other.ratio;
    if (other.max > s->max || (other.max == s->max && other.column < s->column)) {
        s->max = other.max;
        s->column = other.column;
        s->a = other.a;
        s->b = other.b;
    }
}

// s of all lanes of a row, or a part of one, together, in each of them.
DEVICE void merge_lanes(RowStats* s) {
#pragma unroll
    for (int d = ROW_LANES / 2; d > 0; d /= 2) {
        RowStats other;
        other.abs_error = __shfl_xor_sync(FULL_WARP, s->abs_error, d);
        other.squared_error = __shfl_xor_sync(FULL_WARP, s->squared_error, d);
        other.squared_a = __shfl_xor_sync(FULL_WARP, s->squared_a, d);
        other.squared_b = __shfl_xor_sync(FULL_WARP, s->squared_b, d);
        other.product = __shfl_xor_sync(FULL_WARP, s->product, d);
        other.max = __shfl_xor_sync(FULL_WARP, s->max, d);
        other.ratio = __shfl_xor_sync(FULL_WARP, s->ratio, d);
        other.column = __shfl_xor_sync(FULL_WARP, (int)s->column, d);
        other.a = __shfl_xor_sync(FULL_WARP, s->a, d);
        other.b = __shfl_xor_sync(FULL_WARP, s->b, d);
        other.positive = __shfl_xor_sync(FULL_WARP, s->positive, d);
        other.differing = __shfl_xor_sync(FULL_WARP, s->differing, d);
        other.nonfinite_a = __shfl_xor_sync(FULL_WARP, s->nonfinite_a, d);
        other.nonfinite_b = __shfl_xor_sync(FULL_WARP, s->nonfinite_b, d);
        add_stats(s, other);
    }
}

// A row or a part, in all of its lanes; a maximum of -1 is that of no pair. Both halves of a warp come here together: shuffles are for all 32 lanes, and what one
// half has to do with care the other does so too.
template <class S>
DEVICE RowStats row_stats(const Row<S>& row) {
    RowStats s;
    bool right = false;
    if (row.regular) {
        Peak most = {}, ratio = {};
        s = sums_of(row, &most, &ratio);
        const bool fits = s.squared_a + s.squared_b < SQUARES_MAX;
        right = add_peaks(&s, row, most, ratio) && fits;
    }
    if (__ballot_sync(FULL_WARP, !right) != 0) s = careful_stats(row);
    merge_lanes(&s);
    return s;
}

// Stores what is known of a row, by one thread.
DEVICE void store_stats(RowStats* out, RowStats s) {
    if (s.max < 0) s.max = 0;
    *out = s;
}

// What the parts of a wide row have come to.
struct StatsParts {
    RowStats of[BLOCK_PARTS];
};

template <class S>
DEVICE void compare_pair(const StatsPair& pair, int rows, RowStats* out) {
    SHARED(StatsParts, parts);
    const bool wide = pair.width >= WIDE_ROW;  // the same for the whole block
    const int half_warp = threadIdx.x / ROW_LANES, lanes = wide ? BLOCK_PARTS * ROW_LANES : ROW_LANES, lane = threadIdx.x % lanes;
    const int asked = wide ? (int)blockIdx.x : (int)blockIdx.x * BLOCK_PARTS + half_warp;
    if ((wide ? asked : asked - half_warp) >= rows) return;  // another pair has more
    const int t = asked < rows ? asked : rows - 1;  // lanes behind the last row help with it, and store nothing
    const int64_t start = (int64_t)t * pair.width;
    const S* const a = (const S*)pair.a + start;
    const float* const b = pair.b + start;
    // The same for all rows, and so for the whole warp.
    const bool regular = pair.width % 8 == 0 && (((int64_t)pair.a | (int64_t)pair.b) & 15) == 0;
    const Row<S> row = {a, b, pair.width, lane, lanes, regular};
    const RowStats s = row_stats(row);
    if (wide) {
        if (lane % ROW_LANES == 0) parts.of[half_warp] = s;
        __syncthreads();
        if (lane == 0) {
            RowStats all = parts.of[0];
#pragma unroll 1
            for (int i = 1; i < BLOCK_PARTS; i++) add_stats(&all, parts.of[i]);
            store_stats(out + t, all);
        }
    } else {
        if (asked >= rows) return;
        if (lane == 0) store_stats(out + t, s);
    }
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
    const StatsPair& pair = args.pair[blockIdx.y];
    RowStats* const out = args.out + (int64_t)blockIdx.y * args.rows;
    if (pair.a_f16) compare_pair<half_t>(pair, args.rows, out);
    else compare_pair<float>(pair, args.rows, out);
}

KERNEL_SIZED(stats_rows, StatsArgs, BLOCK_PARTS * ROW_LANES, 6, compare_rows)
