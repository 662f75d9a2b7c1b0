// activations/offload_backend.h: bytes are fetched unchanged from every tier; the memory that each backend owns.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <zero/errors.h>

#include "activations/offload_backend.h"
#include "support/folder.h"

namespace zero::activations::offload_backend_test {
namespace {

using step::MemoryLedger;
using step::Purpose;
using step::Tier;

// Other bytes for every `salt`.
at::Tensor bytes_of(std::int64_t numel, int salt) {
  return at::arange(numel, at::kLong).mul(7).add(salt).remainder(251).to(at::kByte);
}

class OffloadBackends : public testing::TestWithParam<const char*> {
 protected:
  OffloadBackends() {
    const std::string place = GetParam();
    if (place == "host") backend_ = std::make_unique<HostBackend>(at::kCPU, blocks_);
    if (place == "file")
      backend_ =
          std::make_unique<FileBackend>(at::kCPU, blocks_, ledger_, folder_.text(), storage::IoSettings{}, "rank 0/1");
    if (place == "slab")
      backend_ = std::make_unique<SlabBackend>(
          std::make_unique<Slab>(16, [](std::int64_t bytes) { return at::empty({bytes}, at::kByte); }));
  }
  std::uint64_t owned(Tier tier) const { return ledger_->report().current(tier, Purpose::Activations); }

  const test::TempFolder folder_;
  const std::shared_ptr<MemoryLedger> ledger_ = std::make_shared<MemoryLedger>();
  const std::shared_ptr<HostBlocks> blocks_ = std::make_shared<HostBlocks>(at::kCPU, ledger_);
  std::unique_ptr<OffloadBackend> backend_;
};
INSTANTIATE_TEST_SUITE_P(Places, OffloadBackends, testing::Values("host", "slab", "file"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(OffloadBackends, BytesComeBackAsTheyLeft) {
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<std::unique_ptr<OffloadHandle>> handles;
    const std::int64_t sizes[] = {1, 1000, 4096, 4097, 70000, 70000, 4096};
    for (int i = 0; i < 7; ++i) {
      auto bytes = bytes_of(sizes[i], i + pass);
      handles.push_back(backend_->offload(bytes));
      bytes.zero_();  // its memory may be used again at once
    }
    for (int i = 6; i >= 0; --i) {
      auto& handle = handles[static_cast<std::size_t>(i)];
      if (i % 2 == 0) handle->begin_fetch();
      if (i % 3 == 0) handle->begin_fetch();
      EXPECT_TRUE(torch::equal(handle->fetch(), bytes_of(sizes[i], i + pass))) << i;
      handle.reset();
    }
    backend_->wait_idle();
  }
}

TEST_P(OffloadBackends, BytesMayBeAskedForTwiceAndNever) {
  const auto often = backend_->offload(bytes_of(5000, 1));
  auto never = backend_->offload(bytes_of(5000, 2));
  never.reset();
  const auto later = backend_->offload(bytes_of(5000, 3));
  EXPECT_TRUE(torch::equal(often->fetch(), bytes_of(5000, 1)));
  EXPECT_TRUE(torch::equal(often->fetch(), bytes_of(5000, 1)));
  EXPECT_TRUE(torch::equal(later->fetch(), bytes_of(5000, 3)));
}

TEST_P(OffloadBackends, PlacesAreUsedAgain) {
  const std::string place = GetParam();
  std::uint64_t host = 0, file = 0;
  for (int pass = 0; pass < 4; ++pass) {
    std::vector<std::unique_ptr<OffloadHandle>> handles;
    for (int i = 0; i < 8; ++i) handles.push_back(backend_->offload(bytes_of(1 << 16, i)));
    for (auto& handle : handles) {
      EXPECT_EQ(handle->fetch().numel(), 1 << 16);
      handle.reset();
    }
    backend_->wait_idle();
    if (pass == 0) host = owned(Tier::Host), file = owned(Tier::File);
    // With a file, up to two writes and one read have blocks at once, depending on timing; otherwise memory is as after
    // the first pass.
    if (place == "file")
      EXPECT_LT(owned(Tier::Host), 4u << 16) << pass;
    else
      EXPECT_EQ(owned(Tier::Host), host) << pass;
    EXPECT_EQ(owned(Tier::File), file) << pass;
  }
  EXPECT_EQ(host > 0, place != "slab");
  if (place == "host") {
    EXPECT_EQ(host, 8u << 16);
  }
  EXPECT_EQ(file, place == "file" ? 16u << 20 : 0u);
  backend_.reset();
  EXPECT_EQ(owned(Tier::File), 0u);
  blocks_->trim();
  blocks_->trim();
  EXPECT_EQ(owned(Tier::Host), 0u);
}

TEST(FileBackendFiles, GrowAndBecomeOne) {
  const test::TempFolder folder;
  const auto ledger = std::make_shared<MemoryLedger>();
  const auto blocks = std::make_shared<HostBlocks>(at::kCPU, ledger);
  FileBackend backend(at::kCPU, blocks, ledger, folder.text(), storage::IoSettings{}, "rank 0/1");
  const auto in_files = [&] { return ledger->report().current(Tier::File, Purpose::Activations) >> 20; };
  const auto large = [](int salt) { return at::full({7 << 20}, salt + 1, at::kByte); };
  EXPECT_EQ(in_files(), 0u) << "none before the first departure";
  std::vector<std::unique_ptr<OffloadHandle>> handles;
  for (int i = 0; i < 5; ++i) handles.push_back(backend.offload(large(i)));
  EXPECT_EQ(in_files(), 64u) << "16, and 16, and 32 more";
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(torch::equal(handles[static_cast<std::size_t>(i)]->fetch(), large(i))) << i;
  backend.wait_idle();
  EXPECT_EQ(in_files(), 64u) << "something is in them";
  handles.clear();
  backend.wait_idle();
  EXPECT_EQ(in_files(), 64u);
  for (int i = 0; i < 9; ++i) handles.push_back(backend.offload(large(i)));
  EXPECT_EQ(in_files(), 64u) << "nine fit into the one of 64, where three files had room for eight";
}

TEST(FileBackendFiles, AFolderThatIsNotThereIsAnErrorAndKeepsNothing) {
  const auto ledger = std::make_shared<MemoryLedger>();
  const auto blocks = std::make_shared<HostBlocks>(at::kCPU, ledger);
  FileBackend backend(at::kCPU, blocks, ledger, "/nonexistent/folder", storage::IoSettings{}, "rank 0/1");
  EXPECT_THROW(backend.offload(bytes_of(100, 1)), IoError);
  backend.wait_idle();
  EXPECT_EQ(ledger->report().current(Tier::File), 0u);
}

}  // namespace
}  // namespace zero::activations::offload_backend_test
