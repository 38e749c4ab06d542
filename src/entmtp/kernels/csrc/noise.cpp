// The noise of sampling: words for ids 0 .. count - 1 at one position, and who can win with it.
#include "engine.h"

using namespace entmtp;

extern "C" {

int entmtp_noise_words(const char* name, uint64_t seed, uint64_t position, int count, uint32_t* words) {
    const Isa* isa = isa_named(name);
    if (!is_supported(isa) || count < 0) return 1;
    isa->noise_words(seed, position, count, words);
    return 0;
}

// How many ids can be the arg-max of scores + noise; all arrays have room for `count`. -1 where an
// argument is wrong, -2 where logits are not finite.
int entmtp_noise_candidates(const char* name, const Draw* draw) {
    const Isa* isa = isa_named(name);
    if (!is_supported(isa) || !draw || draw->count < 0 || !(draw->temperature >= 0)) return -1;
    return isa->noise_candidates(*draw);
}

} // extern "C"
