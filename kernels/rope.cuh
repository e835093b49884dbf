// The rotation of rotary position embedding, for rope.cu and for linear_few.cu, which must give the same bits.
#pragma once
#include "common.cuh"

struct Rotated {
    float a, b;
};

DEVICE Rotated rotate(float a, float b, float cosine, float sine) {
    Rotated r;
    r.a = a * cosine - b * sine;
    r.b = a * sine + b * cosine;
    return r;
}
