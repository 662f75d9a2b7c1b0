// The secret of a run: where it comes from, and how two processes prove to each other that both have it. The secret is
// never sent. Opens no connections.
//
// [Note: handshake] The process that connects says who it is and sends a nonce. The one that listens answers with a
// nonce of its own and a proof, and gets a proof in return. A proof is the HMAC-SHA256, under a key derived from the
// secret and the run, of the side's letter, the purpose, both ranks, the world size and both nonces. A recorded
// handshake is therefore useless later, and a connection cannot be used in another place than the one it was made for.
#pragma once
#include <string>
#include <string_view>

#include "net/process_info.h"

namespace zero::net {

// Bytes of a nonce and of a proof.
inline constexpr std::size_t kProofBytes = 32;

// HMAC-SHA256 (RFC 2104, FIPS 180-4): 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view text);
// 32 bytes of the system's random numbers.
std::string fresh_nonce();
// Takes the same time wherever the two differ.
bool equal_proofs(std::string_view a, std::string_view b);

// ZERO_TOKEN, else the first line of ZERO_TOKEN_FILE; empty on one host without either, and for ZERO_TOKEN=none. Throws
// ConfigError for several hosts without a secret, a file that cannot be read, that others than its owner can read, or
// that is empty.
std::string secret_of(const ProcessInfo& identity, const Environment& environment);

// The key of all proofs of this run and attempt. Without a secret, anyone who knows the run's id can derive it.
std::string key_of(const ProcessInfo& identity);

// What both sides of a connection know at its start.
struct Handshake {
  std::string purpose;
  int size = 0;                 // of the world
  int from = 0, to = 0;         // ranks of the connecting and the listening side
  std::string asked, answered;  // nonces of the connecting and the listening side
  // `side`: 'C' proves the connecting side, 'L' the listening one.
  std::string proof(const std::string& key, char side) const;
};

}  // namespace zero::net
