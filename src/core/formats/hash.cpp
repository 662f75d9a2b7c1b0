#include "formats/hash.h"

#include <sys/random.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "base/hex.h"
#include "formats/files.h"

namespace zero::formats {
namespace {

std::string to_hex(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  return base::hex(canonical.digest, sizeof canonical.digest);
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

std::string Hasher::hex() const { return to_hex(XXH3_128bits_digest(state_->state)); }

std::string hash_of(const void* data, std::size_t bytes) { return to_hex(XXH3_128bits(bytes > 0 ? data : "", bytes)); }

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
