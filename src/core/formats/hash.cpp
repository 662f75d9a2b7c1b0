#include "formats/hash.h"

#include <sys/random.h>
#include <xxhash.h>
#ifdef ZERO_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>  // AVX2 or AVX-512 where the CPU has it, with the same hashes
#endif

#include <algorithm>
#include <cerrno>
#include <new>

#include "base/hex.h"
#include "formats/files.h"

namespace zero::formats {
namespace {

std::string canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  return {reinterpret_cast<const char*>(bytes.digest), sizeof bytes.digest};
}

}  // namespace

struct Hasher::State {
  State() : state(XXH3_createState()) {
    if (state == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(state);
  }
  ~State() { XXH3_freeState(state); }
  XXH3_state_t* state;
};

Hasher::Hasher() : state_(std::make_unique<State>()) {}
Hasher::~Hasher() = default;

void Hasher::add(const void* data, std::size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(state_->state, data, bytes);
}

std::string Hasher::digest() const { return canonical(XXH3_128bits_digest(state_->state)); }
std::string Hasher::hex() const { return hex_of(digest()); }
void Hasher::reset() { XXH3_128bits_reset(state_->state); }

std::string raw_hash_of(const void* data, std::size_t bytes) {
  return canonical(XXH3_128bits(bytes > 0 ? data : "", bytes));
}
std::string hash_of(const void* data, std::size_t bytes) { return hex_of(raw_hash_of(data, bytes)); }

std::string hex_of(std::string_view digest) {
  return base::hex(reinterpret_cast<const unsigned char*>(digest.data()), digest.size());
}

bool is_hash(std::string_view text) {
  return text.size() == 32 &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::string random_id() {
  unsigned char bytes[16];
  std::size_t got = 0;
  while (got < sizeof bytes) {
    const auto n = ::getrandom(bytes + got, sizeof bytes - got, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io("getrandom", "drawing an id", errno);
    got += static_cast<std::size_t>(n);
  }
  return base::hex(bytes, sizeof bytes);
}

}  // namespace zero::formats
