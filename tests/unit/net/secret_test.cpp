// The secret of a run: where it comes from, and proofs of it. The reference values are those of RFC 4231.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <fstream>
#include <map>
#include <set>

#include <zero/errors.h>

#include "net/descriptors.h"
#include "net/secret.h"
#include "net/socket.h"
#include "support/folder.h"

namespace zero::net::secret_test {
namespace {

std::string hex(const std::string& bytes) {
  std::string text;
  for (const unsigned char c : bytes) text += {"0123456789abcdef"[c >> 4], "0123456789abcdef"[c & 15]};
  return text;
}

TEST(Secret, ProofsAreHmacSha256) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(fresh_nonce().size(), kProofBytes);
  EXPECT_NE(fresh_nonce(), fresh_nonce());
  EXPECT_TRUE(equal_proofs("ab", "ab"));
  EXPECT_FALSE(equal_proofs("ab", "ac") || equal_proofs("ab", "abc") || equal_proofs("", "a"));
}

ProcessInfo two_hosts() {
  ProcessInfo identity;
  identity.size = 2, identity.run_id = "run", identity.master_addr = "a", identity.master_port = 1;
  identity.secret = "s";
  return identity;
}

TEST(Secret, EveryPartOfAHandshakeChangesTheProof) {
  const Handshake plain{"control", 2, 1, 0, "nonce", "other"};
  std::set<std::string> proofs{plain.proof("k", 'C'), plain.proof("k", 'L'), plain.proof("K", 'C')};
  const std::vector<Handshake> others{{"shm", 2, 1, 0, "nonce", "other"},     {"control", 3, 1, 0, "nonce", "other"},
                                      {"control", 2, 2, 0, "nonce", "other"}, {"control", 2, 1, 1, "nonce", "other"},
                                      {"control", 2, 1, 0, "nonceo", "ther"}, {"control", 2, 1, 0, "nonce", ""},
                                      {"control", 21, 0, 0, "nonce", "other"}};
  for (const auto& other : others) proofs.insert(other.proof("k", 'C'));
  EXPECT_EQ(proofs.size(), 3 + others.size());

  std::set<std::string> keys{key_of(two_hosts())};
  const auto change = [&](auto&& body) {
    auto identity = two_hosts();
    body(identity);
    keys.insert(key_of(identity));
  };
  change([](ProcessInfo& i) { i.secret = "t"; });
  change([](ProcessInfo& i) { i.run_id = "run2"; });
  change([](ProcessInfo& i) { i.attempt = "1"; });
  change([](ProcessInfo& i) { i.master_port = 2; });
  EXPECT_EQ(keys.size(), 5u);
  std::set<std::string> names;
  for (const auto& key : keys) names.insert(local_name("meet", key));
  EXPECT_EQ(names.size(), keys.size());
}

struct Given {
  std::map<std::string, std::string> variables;
  Environment environment() const {
    return [this](const std::string& name) -> std::optional<std::string> {
      const auto it = variables.find(name);
      return it == variables.end() ? std::nullopt : std::optional(it->second);
    };
  }
  std::string on(int hosts) const {
    auto identity = two_hosts();
    identity.local_size = hosts == 1 ? 2 : 1;
    try {
      return "got " + secret_of(identity, environment());
    } catch (const ConfigError& error) {
      return error.what();
    }
  }
};

TEST(Secret, ComesFromAVariableOrAFileThatOnlyItsOwnerReads) {
  const test::TempFolder folder;
  const auto file = [&](const std::string& name, const std::string& text, mode_t mode) {
    const auto path = folder.file(name);
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(Given{}.on(1), "got ");
  EXPECT_TRUE(has(Given{}.on(2), "[Communicator::from_env] got no ZERO_TOKEN for 2 ranks on several hosts"));
  for (const int hosts : {1, 2}) {
    EXPECT_EQ((Given{{{"ZERO_TOKEN", "abc"}}}.on(hosts)), "got abc");
    EXPECT_EQ((Given{{{"ZERO_TOKEN", "none"}}}.on(hosts)), "got ");
    const auto from = [&](const std::string& path) { return Given{{{"ZERO_TOKEN_FILE", path}}}.on(hosts); };
    EXPECT_EQ(from(file("good", "abc def\nmore\n", 0600)), "got abc def");
    EXPECT_EQ(from(file("readonly", "abc", 0400)), "got abc");
    EXPECT_TRUE(has(from(file("group", "abc", 0640)), "its group or others can use")) << from(folder.file("group"));
    EXPECT_TRUE(has(from(file("others", "abc", 0604)), "its group or others can use"));
    EXPECT_TRUE(has(from(file("empty", "\nabc", 0600)), "first line is empty"));
    EXPECT_TRUE(has(from(file("long", std::string(5000, 'x'), 0600)), "too long"));
    EXPECT_TRUE(has(from(folder.file("absent")), "No such file"));
    EXPECT_TRUE(has(from(folder.text()), "no regular file"));
  }
}

TEST(Descriptors, AreCountedAndTooFewAreRefusedInWords) {
  const int before = open_descriptors();
  EXPECT_GE(before, 3);
  const base::Descriptor one(::dup(0));
  EXPECT_EQ(open_descriptors(), before + 1);
  reserve_descriptors(1, "nothing", "rank 0/1");
  try {
    reserve_descriptors(1 << 30, "many ranks", "rank 0/1");
    FAIL() << "a limit of a thousand million";
  } catch (const CommError& error) {
    const std::string text = error.what();
    for (const auto* part : {"file descriptors", "many ranks", "rank 0/1", "ulimit -Hn"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace zero::net::secret_test
