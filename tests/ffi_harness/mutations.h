// Calls with something wrong, or something that is right by chance.

#ifndef JAX_FP8GEMM_TESTS_MUTATIONS_H_
#define JAX_FP8GEMM_TESTS_MUTATIONS_H_

#include "cases.h"
#include "random.h"

namespace harness {

// Changes one to three things of a call: types, ranks, extents, addresses, the number of operands
// and results, members of the config, the kind of an attribute.
void Mutate(Random& random, Case& c);

// A value for a member of a config: small, a power of two or its neighbour, at the ends of int32,
// or any of its 2^32.
int32_t AnyInt32(Random& random);

}  // namespace harness

#endif  // JAX_FP8GEMM_TESTS_MUTATIONS_H_
