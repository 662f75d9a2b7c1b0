// Offloaded activations: each range of memory is offloaded once, fetched with the same bits and strides, and booked on
// its tier. Without an engine; with one: tests/parity/activations_test.cpp.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <zero/library.h>

#include <filesystem>

#include "activations/activation_store.h"
#include "support/folder.h"
#include "torch_hooks/allocation_observer.h"

namespace zero::activation_store_test {
namespace {

using activations::ActivationStore;
using config::OffloadDevice;
using step::Purpose;
using step::Tier;

at::Tensor random_tensor(at::IntArrayRef sizes, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator);
}

std::string fault_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// A store as an engine has it, for this thread.
class Kept {
 public:
  explicit Kept(const config::ActivationSettings& settings, std::vector<const void*> resident = {})
      : ledger_(std::make_shared<step::MemoryLedger>()),
        observer_([ledger = ledger_](std::int64_t bytes) { ledger->book(Tier::Device, Purpose::Activations, bytes); }) {
    store_ = ActivationStore::create({.settings = settings,
                                      .io = {},
                                      .device = at::kCPU,
                                      .ledger = ledger_,
                                      .who = "rank 0/1",
                                      .resident = std::move(resident),
                                      .profile = [this](const std::string& line) { lines.push_back(line); }});
    torch_hooks::set_saved_tensor_policy(store_);
  }
  ~Kept() { torch_hooks::set_saved_tensor_policy(nullptr); }
  ActivationStore::Counts counts() const { return store_->counts(); }
  std::int64_t bytes(Tier tier) const {
    return static_cast<std::int64_t>(ledger_->report().current(tier, Purpose::Activations));
  }
  ActivationStore& store() { return *store_; }
  std::vector<std::string> lines;

 private:
  std::shared_ptr<step::MemoryLedger> ledger_;
  torch_hooks::AllocationObserver observer_;
  std::shared_ptr<ActivationStore> store_;
};

config::ActivationSettings to(OffloadDevice device, std::int64_t min_bytes = 1024) {
  config::ActivationSettings settings;
  settings.offload = {device, std::filesystem::temp_directory_path().string(), min_bytes};
  return settings;
}

class Tiers : public ::testing::TestWithParam<OffloadDevice> {};
INSTANTIATE_TEST_SUITE_P(HostAndFile, Tiers, ::testing::Values(OffloadDevice::Cpu, OffloadDevice::Nvme),
                         [](const auto& info) { return info.param == OffloadDevice::Cpu ? "host" : "file"; });

TEST_P(Tiers, ViewsOfOneStorageLeaveOnceAndComeBack) {
  auto leaf = random_tensor({64, 96}, 1).requires_grad_();
  const auto loss_of = [&] {
    const auto parts = (leaf * 2).view({64, 3, 32}).permute({1, 0, 2}).unbind(0);  // as attention has them
    return (parts[0] * parts[1]).sum() + (parts[1] * parts[2]).exp().sum();
  };
  const auto plain = torch::autograd::grad({loss_of()}, {leaf})[0];
  Kept kept(to(GetParam()));
  auto loss = loss_of();
  // q, k, k and v are one storage; exp() keeps its result.
  EXPECT_EQ(kept.counts().left, 2);
  EXPECT_EQ(kept.counts().bytes_left, (64 * 96 + 64 * 32) * 4);
  EXPECT_LT(kept.bytes(Tier::Device), 1024);
  const auto away = GetParam() == OffloadDevice::Cpu ? Tier::Host : Tier::File;
  EXPECT_GE(kept.bytes(away), (64 * 96 + 64 * 32) * 4);
  EXPECT_TRUE(torch::autograd::grad({loss}, {leaf})[0].equal(plain));
  EXPECT_EQ(kept.counts().returned, 2);
  EXPECT_EQ(kept.counts().in_store, 0);
  kept.store().end_backward();
  EXPECT_TRUE(fault_of([&] { (void)loss_of(); }).empty());
}

// Fetched tensors have their original strides, because a kernel's code path, and so its result, may depend on them.
struct Remember : torch::autograd::Function<Remember> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& kept) {
    context->save_for_backward({kept});
    context->saved_data["strides"] = kept.strides().vec();
    context->saved_data["sizes"] = kept.sizes().vec();
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto kept = context->get_saved_variables()[0];
    EXPECT_EQ(kept.strides().vec(), context->saved_data["strides"].toIntVector());
    EXPECT_EQ(kept.sizes().vec(), context->saved_data["sizes"].toIntVector());
    return {grads[0] * kept.sum(), at::Tensor()};
  }
};

TEST_P(Tiers, StridesAndValuesOfAnyView) {
  const auto base = random_tensor({32, 40, 24}, 2);
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> views = {
      {"contiguous", [](const at::Tensor& b) { return b; }},
      {"transposed", [](const at::Tensor& b) { return b.transpose(0, 2); }},
      {"every other", [](const at::Tensor& b) { return b.slice(1, 1, 40, 2); }},
      {"a part at the end", [](const at::Tensor& b) { return b.narrow(0, 29, 3); }},
      {"a column", [](const at::Tensor& b) { return b.select(2, 5); }},
      {"expanded",
       [](const at::Tensor& b) {
         return b.narrow(1, 3, 1).expand({32, 40, 24});
       }},
      {"overlapping", [](const at::Tensor& b) { return b.view({-1}).unfold(0, 512, 128); }},
  };
  for (const auto& [name, view] : views) {
    SCOPED_TRACE(name);
    auto leaf = random_tensor({8}, 3).requires_grad_();
    const auto expected = at::full({8}, view(base).sum().item<float>());
    Kept kept(to(GetParam(), 64));
    auto copy = base.clone();
    auto y = Remember::apply(leaf, view(copy));
    copy = at::Tensor();
    EXPECT_EQ(kept.counts().left, 1);
    EXPECT_TRUE(torch::autograd::grad({y.sum()}, {leaf})[0].equal(expected));
    EXPECT_EQ(kept.counts().returned, 1);
  }
}

TEST_P(Tiers, APartOfALargeStorageLeavesAlone) {
  const auto large = random_tensor({1 << 18}, 4);
  auto leaf = random_tensor({4096}, 5).requires_grad_();
  Kept kept(to(GetParam()));
  auto y = leaf * large.narrow(0, 1001, 4096);
  EXPECT_EQ(kept.counts().left, 1);
  EXPECT_LT(kept.counts().bytes_left, 4096 * 4 + 64);
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {leaf})[0].equal(large.narrow(0, 1001, 4096)));
  EXPECT_EQ(kept.counts().returned, 0) << "the storage is there, so nothing is copied back";
  EXPECT_EQ(kept.counts().still_there, 1);
}

TEST_P(Tiers, AVersionIsNotTakenForAnother) {
  auto leaf = random_tensor({2048}, 6).requires_grad_();
  Kept kept(to(GetParam()));
  auto x = leaf * 2;
  auto old = x.sin();  // saves x
  x.add_(1);
  auto now = x.sin();
  x = at::Tensor();
  EXPECT_EQ(kept.counts().left, 2);
  EXPECT_TRUE(torch::autograd::grad({now.sum()}, {leaf})[0].equal(((leaf.detach() * 2 + 1).cos() * 2)));
  const auto fault = fault_of([&] { old.sum().backward(); });
  EXPECT_NE(fault.find("written in place"), std::string::npos) << fault;
}

TEST_P(Tiers, ParametersSmallTensorsAndBuffersStay) {
  auto weight = random_tensor({64, 64}, 7).requires_grad_();
  auto buffer = random_tensor({64, 64}, 8);
  Kept kept(to(GetParam(), 64 * 64 * 4), {buffer.storage().unsafeGetStorageImpl()});
  auto input = random_tensor({32, 64}, 9).requires_grad_();
  // A parameter's transpose, the input (a leaf), a buffer, and results of 8 KiB.
  auto y = input.mm(weight.t()).mm(buffer).tanh();
  EXPECT_EQ(kept.counts().left, 0);
  y.sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST_P(Tiers, ARetainedGraphIsServedTwice) {
  auto leaf = random_tensor({4096}, 10).requires_grad_();
  Kept kept(to(GetParam()));
  auto loss = (leaf * 2).tanh().sin().sum();
  const auto once = torch::autograd::grad({loss}, {leaf}, {}, /*retain_graph=*/true)[0];
  kept.store().end_backward();
  EXPECT_TRUE(torch::autograd::grad({loss}, {leaf})[0].equal(once));
  EXPECT_EQ(kept.counts().returned, 2);  // tanh's result is sin's input: once each pass
}

TEST_P(Tiers, ForwardWithoutBackwardLeavesNothing) {
  auto leaf = random_tensor({4096}, 11).requires_grad_();
  Kept kept(to(GetParam()));
  { auto unused = (leaf * 2).tanh().sin(); }
  EXPECT_GT(kept.counts().left, 0);
  EXPECT_EQ(kept.counts().in_store, 0);
  kept.store().end_backward();
  kept.store().end_backward();
  EXPECT_EQ(kept.bytes(Tier::Host), 0) << "idle memory that no pass used";
  EXPECT_EQ(kept.bytes(Tier::Device), 0);
}

TEST(ActivationFile, HasNoNameAndGrows) {
  const test::TempFolder folder;
  config::ActivationSettings settings;
  settings.offload = {OffloadDevice::Nvme, folder.text(), 1024};
  auto leaf = random_tensor({1 << 20}, 12).requires_grad_();  // 4 MiB
  {
    Kept kept(settings);
    for (int pass = 0; pass < 2; ++pass) {
      auto x = leaf * 2;
      for (int i = 0; i < 12; ++i) x = x.tanh();
      EXPECT_GE(kept.bytes(Tier::File), 12 << 22);
      EXPECT_EQ(kept.counts().in_store, 12);
      x.sum().backward();
      x = at::Tensor();
      kept.store().end_backward();
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    EXPECT_EQ(kept.counts().bytes_returned, 2 * (11 << 22)) << "the last one is there";
  }
}

TEST(ActivationFile, AFolderThatIsNoneIsAnError) {
  config::ActivationSettings settings;
  settings.offload = {OffloadDevice::Nvme, "/nowhere/at/all", 1024};
  const auto fault = fault_of([&] {
    ActivationStore::create({.settings = settings,
                             .io = {},
                             .device = at::kCPU,
                             .ledger = nullptr,
                             .who = "",
                             .resident = {},
                             .profile = {}});
  });
  EXPECT_NE(fault.find("libzero.activation_offload.nvme_path: got /nowhere/at/all"), std::string::npos) << fault;
}

// --- segments ---------------------------------------------------------------------------------

config::ActivationSettings segments(bool to_host, std::int64_t slots = 0, const std::string& path = "") {
  config::ActivationSettings settings;
  settings.to_host = to_host;
  settings.contiguous = slots > 0;
  settings.num_checkpoints = slots;
  settings.file_path = path;
  return settings;
}

struct Setup {
  const char* name;
  config::ActivationSettings settings;
};
class Segments : public ::testing::TestWithParam<Setup> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Segments,
                         ::testing::Values(Setup{"host", segments(true)}, Setup{"slab", segments(false, 6)},
                                           Setup{"slab_in_host_memory", segments(true, 6)},
                                           Setup{"file",
                                                 segments(false, 0, std::filesystem::temp_directory_path().string())}),
                         [](const auto& info) { return info.param.name; });

at::Tensor four(const at::Tensor& x, bool checkpointed) {
  auto y = x * 1.5;
  for (int i = 0; i < 4; ++i) {
    const auto segment = [](const at::Tensor& a, const at::Tensor& b) { return (a.tanh() * b).sin() + a; };
    y = checkpointed ? activation_checkpoint(segment, y, y.flip(0)) : segment(y, y.flip(0));
  }
  return y.sum();
}

TEST_P(Segments, InputsLeaveAndComeBack) {
  auto leaf = random_tensor({64, 64}, 13).requires_grad_();
  const auto plain = torch::autograd::grad({four(leaf, false)}, {leaf})[0];
  Kept kept(GetParam().settings);
  for (int pass = 0; pass < 3; ++pass) {
    auto loss = four(leaf, true);
    EXPECT_EQ(kept.counts().in_store, 8);
    EXPECT_TRUE(torch::autograd::grad({loss}, {leaf})[0].equal(plain)) << "pass " << pass;
    EXPECT_EQ(kept.counts().in_store, 0);
    kept.store().end_backward();
  }
  const auto& settings = GetParam().settings;
  const std::int64_t bytes = 8 * 64 * 64 * 4;
  if (!settings.to_host && settings.contiguous) {
    EXPECT_EQ(kept.bytes(Tier::Device), 2 * 6 * 64 * 64 * 4);
  }
  if (settings.to_host) {
    EXPECT_EQ(kept.bytes(Tier::Host), settings.contiguous ? bytes * 6 / 4 : bytes);
  }
  if (!settings.file_path.empty()) {
    EXPECT_GE(kept.bytes(Tier::File), bytes);
  }
}

TEST_P(Segments, WritesToInputsAreErrors) {
  auto leaf = random_tensor({64, 64}, 14).requires_grad_();
  Kept kept(GetParam().settings);
  auto x = leaf * 2;
  auto y = activation_checkpoint([](const at::Tensor& a) { return a.tanh(); }, x);
  x.add_(1);
  EXPECT_NE(fault_of([&] { y.sum().backward(); }).find("input that was written in place"), std::string::npos);
  y = activation_checkpoint([](const at::Tensor& a) { return a.add_(1).tanh(); }, leaf * 2);
  EXPECT_NE(fault_of([&] { y.sum().backward(); }).find("input that was written in place"), std::string::npos);
}

TEST_P(Segments, NestedOnesKeepTheOuterInputOnly) {
  auto leaf = random_tensor({64, 64}, 15).requires_grad_();
  const auto inner = [](const at::Tensor& a) { return a.tanh().sin(); };
  const auto outer = [&](const at::Tensor& a) { return activation_checkpoint(inner, activation_checkpoint(inner, a)); };
  const auto plain = torch::autograd::grad({inner(inner(leaf * 2)).sum()}, {leaf})[0];
  Kept kept(GetParam().settings);
  auto loss = activation_checkpoint(outer, leaf * 2).sum();
  EXPECT_EQ(kept.counts().left, 1);
  EXPECT_TRUE(torch::autograd::grad({loss}, {leaf})[0].equal(plain));
}

TEST(Slabs, MoreCheckpointsThanSlotsAreAnError) {
  auto leaf = random_tensor({64, 64}, 16).requires_grad_();
  Kept kept(segments(false, 3));
  const auto fault = fault_of([&] { (void)four(leaf, true); });
  EXPECT_NE(fault.find("got checkpoint 4 before backward, expected at most "
                       "activation_checkpointing.number_checkpoints = 3"),
            std::string::npos)
      << fault;
  // The failed pass left nothing behind.
  EXPECT_EQ(kept.counts().in_store, 0);
}

TEST(Slabs, LargerInputsMakeALargerSlabOnce) {
  Kept kept(segments(false, 4));
  for (const std::int64_t rows : {64, 32, 128, 128, 16}) {
    auto leaf = random_tensor({rows, 64}, 17).requires_grad_();
    four(leaf, true).backward();
    kept.store().end_backward();
  }
  EXPECT_EQ(kept.bytes(Tier::Device), 2 * 4 * 128 * 64 * 4);
}

TEST(Profile, ALineAfterEachBackward) {
  config::ActivationSettings settings;
  settings.profile = true;
  auto leaf = random_tensor({64, 64}, 18).requires_grad_();
  Kept kept(settings);
  auto loss = four(leaf, true);
  EXPECT_EQ(kept.counts().left, 0);
  loss.backward();
  kept.store().end_backward();
  ASSERT_EQ(kept.lines.size(), 1u);
  EXPECT_NE(kept.lines[0].find("4 segments, ms forward + again:"), std::string::npos) << kept.lines[0];
  EXPECT_EQ(std::count(kept.lines[0].begin(), kept.lines[0].end(), '+'), 6) << kept.lines[0];
  EXPECT_EQ(kept.lines[0].find("+0.00;"), std::string::npos) << "a second run takes time: " << kept.lines[0];
}

TEST(OffloadAndSegments, InputsOfSegmentsLeaveToo) {
  auto leaf = random_tensor({64, 64}, 19).requires_grad_();
  const auto plain = torch::autograd::grad({four(leaf, false)}, {leaf})[0];
  Kept kept(to(OffloadDevice::Cpu));
  auto loss = four(leaf, true);
  EXPECT_EQ(kept.counts().in_store, 8);
  EXPECT_TRUE(torch::autograd::grad({loss}, {leaf})[0].equal(plain));
}

TEST(Threads, AStoreIsOfItsThread) {
  auto leaf = random_tensor({4096}, 20).requires_grad_();
  Kept kept(to(OffloadDevice::Cpu));
  std::thread([&] {
    auto y = (leaf * 2).tanh();
    EXPECT_EQ(torch_hooks::saved_tensor_policy(), nullptr);
  }).join();
  EXPECT_EQ(kept.counts().left, 0);
  auto y = (leaf * 2).tanh();
  EXPECT_EQ(kept.counts().left, 1);
}

}  // namespace
}  // namespace zero::activation_store_test
