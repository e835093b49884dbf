// What is known of a row of a candidate and of its reference, or of some of its columns, and how it is put together.
#pragma once
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

DEVICE RowStats no_stats(int width) {
    RowStats s = {};
    s.max = -1.0;  // of nothing
    s.column = width;
    return s;
}

DEVICE void add_sums(RowStats* s, float x, float y) {
    const double a = x, b = y, error = a - b;
    s->abs_error += fabs(error);
    s->squared_error += error * error;
    s->squared_a += a * a;
    s->squared_b += b * b;
    s->product += a * b;
}

// The maximum with one more pair of finite numbers.
DEVICE void add_max(RowStats* s, float x, float y, int column) {
    const double size = fabs((double)x - y);
    if (!(size > s->max)) return;
    s->max = size;
    s->column = column;
    s->a = x;
    s->b = y;
}

// over / under, of which the largest is found before anything is divided.
struct Fraction {
    double over, under;
};

// The larger of two fractions, of which the other is |x - y| / |y| and 0/0 counts as nothing. Where rounded products do not
// tell them apart, what rounding took off does.
DEVICE void add_ratio(Fraction* largest, float x, float y) {
    const double over = fabs((double)x - y), under = fabsf(y);
    const double own = over * largest->under, other = largest->over * under;
    const bool larger = own > other || (own == other && fma(over, largest->under, -own) > fma(largest->over, under, -other));
    if (larger) *largest = {over, under};
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

// x and that of the lane `distance` away, which is in the same row.
template <class T>
DEVICE T both(T x, int distance) { return x + __shfl_xor_sync(FULL_WARP, x, distance); }

// Puts together what two lanes have; a and b, which belong to the maximum, stay. `careful`: whether numbers that are not
// finite have been counted.
DEVICE void merge(RowStats* s, int* column, bool careful, int distance) {
    s->abs_error = both(s->abs_error, distance);
    s->squared_error = both(s->squared_error, distance);
    s->squared_a = both(s->squared_a, distance);
    s->squared_b = both(s->squared_b, distance);
    s->product = both(s->product, distance);
    s->positive = both(s->positive, distance);
    s->differing = both(s->differing, distance);
    if (careful) {
        s->nonfinite_a = both(s->nonfinite_a, distance);
        s->nonfinite_b = both(s->nonfinite_b, distance);
    }
    s->ratio = fmax(s->ratio, __shfl_xor_sync(FULL_WARP, s->ratio, distance));
    const double max = __shfl_xor_sync(FULL_WARP, s->max, distance);
    const int other = __shfl_xor_sync(FULL_WARP, *column, distance);
    if (max > s->max || (max == s->max && other < *column)) {
        s->max = max;
        *column = other;
    }
}
