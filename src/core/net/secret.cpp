// See secret.h. The only user of libsodium.
#include "net/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <zero/errors.h>

#include "base/check.h"
#include "base/fd.h"

namespace zero::net {
namespace {

constexpr std::size_t kMostSecretBytes = 4096;

// Length first, so that two lists of fields never give the same text.
void add_field(std::string& text, std::string_view field) {
  text += base::join(field.size(), ":");
  text += field;
}

std::string token_from_file(const std::string& path, const std::string& place) {
  const auto refuse = [&](const std::string& got, const std::string& hint) {
    throw ConfigError(base::join("[Communicator::from_env] got ZERO_TOKEN_FILE='", path, "', ", got,
                                 ", expected a file with the secret of the run (", place, "). Hint: ", hint));
  };
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    refuse(std::strerror(errno), "every host needs the file, with the same contents.");
  if (!S_ISREG(status.st_mode)) refuse("which is no regular file", "write the secret to a file.");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    refuse("which its group or others can use", base::join("chmod 600 ", path));
  std::string text(kMostSecretBytes + 1, '\0');
  const auto got = ::read(file.get(), text.data(), text.size());
  if (got < 0) refuse(std::strerror(errno), "every host needs the file, with the same contents.");
  text.resize(static_cast<std::size_t>(got));
  if (text.size() > kMostSecretBytes) refuse("which is too long", base::join("at most ", kMostSecretBytes, " bytes."));
  text = text.substr(0, text.find_first_of("\r\n"));
  if (text.empty()) refuse("whose first line is empty", "for example: openssl rand -hex 32 > FILE");
  return text;
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view text) {
  const auto bytes = [](std::string_view s) { return reinterpret_cast<const unsigned char*>(s.data()); };
  crypto_auth_hmacsha256_state state;
  std::string proof(crypto_auth_hmacsha256_BYTES, '\0');
  crypto_auth_hmacsha256_init(&state, bytes(key), key.size());
  crypto_auth_hmacsha256_update(&state, bytes(text), text.size());
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(proof.data()));
  sodium_memzero(&state, sizeof state);
  return proof;
}

std::string fresh_nonce() {
  std::string nonce(kProofBytes, '\0');
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

bool equal_proofs(std::string_view a, std::string_view b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string secret_of(const ProcessInfo& identity, const Environment& environment) {
  if (const auto token = environment("ZERO_TOKEN")) return *token == "none" ? "" : *token;
  if (const auto path = environment("ZERO_TOKEN_FILE")) return token_from_file(*path, identity.place());
  if (!identity.one_host())
    throw ConfigError(base::join(
        "[Communicator::from_env] got no ZERO_TOKEN for ", identity.size, " ranks on several hosts (", identity.source,
        ", ", identity.place(),
        "), expected a secret that only they have: anyone who reaches their ports could join them."
        " Hint: set ZERO_TOKEN to the same random text on every host, for example of `openssl rand -hex 32`, or "
        "ZERO_TOKEN_FILE to a file with it; `zero run` makes one itself. ZERO_TOKEN=none does without, on a network "
        "of the run's own."));
  return "";
}

std::string key_of(const ProcessInfo& identity) {
  std::string text = "zero/1";
  add_field(text, identity.run_id);
  add_field(text, base::join(identity.master_addr, ":", identity.master_port));
  add_field(text, identity.attempt);
  return hmac_sha256(identity.secret, text);
}

std::string Handshake::proof(const std::string& key, char side) const {
  std::string text(1, side);
  add_field(text, purpose);
  for (const int number : {size, from, to}) add_field(text, std::to_string(number));
  add_field(text, asked);
  add_field(text, answered);
  return hmac_sha256(key, text);
}

}  // namespace zero::net
