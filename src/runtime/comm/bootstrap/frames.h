// Kinds of the FailureDetector's frames, for its two files.
#pragma once

namespace zero::comm::frame {

// The handshake (net/secret.h): client, hub, client.
inline constexpr char kHello = 'H';      // nonce, world size
inline constexpr char kChallenge = 'C';  // nonce, proof
inline constexpr char kProof = 'R';      // proof
// Only on connections that have proved the secret.
inline constexpr char kMissing = 'M';   // hub: the ranks that have not connected yet
inline constexpr char kWelcome = 'W';   // hub: all ranks are connected; the session, the hub's address
inline constexpr char kKey = 'K';       // "key\0value"
inline constexpr char kAbort = 'X';     // "rank reason": that rank failed
inline constexpr char kFarewell = 'B';  // this rank ends normally
inline constexpr char kAsk = 'Q', kProgress = 'P';
inline constexpr char kWaits = 'N';  // to the hub: the latest calls, a line each, of a rank that waits in one

}  // namespace zero::comm::frame
