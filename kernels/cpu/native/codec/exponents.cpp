// Bfloat16 numbers without loss, in groups of 64: signs and mantissas as they are; of each exponent how far it is behind the
// group's largest one, in 3 bits, where 7 says that the exponent itself follows behind all groups (comm/transport/wire_codec.py).
#include "codec.h"

namespace {
constexpr int GROUP = 64, VECTORS = GROUP / LANES, ESCAPE = 7;
using Behind = Planes<GROUP, 0, 2, 1>;

// The sections of a message.
struct Sections {
    char *rest, *planes, *largest, *escapes;
    int64_t num_groups;

    Sections(address start, int64_t num_groups) : rest((char *)start), num_groups(num_groups) {
        planes = rest + GROUP * num_groups;
        largest = planes + GROUP * 3 / 8 * num_groups;
        escapes = largest + num_groups;
    }
};

// Returns where the escapes of the next group begin.
char *encode_group(const Sections &message, int64_t group, const char *source, char *escapes) {
    I32 codes[VECTORS], largest = splat_int(0);
    alignas(64) uint8_t exponents[GROUP];
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        const I32 bits = load_low_halves(source + 2 * LANES * i);
        codes[i] = shift_right(bits, 7) & splat_int(0xFF);
        largest = maximum_unsigned(largest, codes[i]);
        const Bytes own = low_bytes(codes[i]);
        const Bytes rest = low_bytes((shift_right(bits, 8) & splat_int(0x80)) | (bits & splat_int(0x7F)));
        memcpy(message.rest + GROUP * group + LANES * i, &rest, sizeof rest);
        memcpy(exponents + LANES * i, &own, sizeof own);
    }
    const int32_t most = max_lanes_unsigned(largest);
    message.largest[group] = (char)most;
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        const I32 behind = splat_int(most) - codes[i], reach = splat_int(ESCAPE);
        codes[i] = select(behind < reach, behind, reach);
    }
    Behind(message.planes, message.num_groups, group).store(codes);
    for (int at = 0; at < GROUP; at++) {
        *escapes = (char)exponents[at];
        escapes += exponents[at] <= most - ESCAPE;
    }
    return escapes;
}

// Returns where the escapes of the next group begin, or null if these would end behind `end`.
const char *decode_group(const Sections &message, int64_t group, const char *escapes, const char *end, char *target) {
    const Behind planes(message.planes, message.num_groups, group);
    alignas(64) uint8_t behind[GROUP];
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        const I32 code = planes.load(LANES * i), exponents = splat_int((uint8_t)message.largest[group]) - code;
        const Bytes own = low_bytes(code);
        Bytes packed;
        memcpy(behind + LANES * i, &own, sizeof own);
        memcpy(&packed, message.rest + GROUP * group + LANES * i, sizeof packed);
        const I32 rest = widen(packed), sign = shift_left(rest & splat_int(0x80), 8);
        store_low_halves(target + 2 * LANES * i, sign | (rest & splat_int(0x7F)) | shift_left(exponents, 7));
    }
    uint64_t escaped = 0;
    for (int at = 0; at < GROUP; at++) escaped |= (uint64_t)(behind[at] == ESCAPE) << at;
    if (end - escapes < __builtin_popcountll(escaped)) return nullptr;
    for (; escaped; escaped &= escaped - 1) {
        char *place = target + 2 * __builtin_ctzll(escaped);
        const uint32_t bits = (load_u16(place) & 0x807F) | (uint8_t)*escapes++ << 7;
        memcpy(place, &bits, 2);
    }
    return escapes;
}
}  // namespace

int64_t tw_encode_exponents(address message, address numbers, int64_t num_groups) {
    const Sections sections(message, num_groups);
    char *escapes = sections.escapes;
    for (int64_t group = 0; group < num_groups; group++)
        escapes = encode_group(sections, group, (const char *)numbers + 2 * GROUP * group, escapes);
    return escapes - sections.rest;
}
int64_t tw_decode_exponents(address message, int64_t num_bytes, address numbers, int64_t num_groups) {
    const Sections sections(message, num_groups);
    const char *escapes = sections.escapes, *end = sections.rest + num_bytes;
    for (int64_t group = 0; escapes && group < num_groups; group++)
        escapes = decode_group(sections, group, escapes, end, (char *)numbers + 2 * GROUP * group);
    return escapes == end;
}
