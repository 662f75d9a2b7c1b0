// torch_hooks/storage_access.h: a tensor remains valid while its data is released and replaced.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>

#include "torch_hooks/storage_access.h"

namespace zero::torch_hooks::storage_access_test {
namespace {

TEST(StorageAccess, AliasLiesInsideTheBufferAndKeepsIt) {
  auto buffer = at::arange(12, at::kFloat);
  const auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(buffer.storage().getWeakStorageImpl());
  auto tensor = alias(buffer, 4 * 4, {2, 3}, at::kFloat);
  EXPECT_TRUE(torch::equal(tensor, at::arange(4, 10, at::kFloat).view({2, 3})));
  EXPECT_NE(tensor.storage().unsafeGetStorageImpl(), buffer.storage().unsafeGetStorageImpl());
  EXPECT_EQ(tensor.storage().nbytes(), 24u);
  tensor.fill_(1);
  EXPECT_EQ(buffer[4].item<float>(), 1);
  EXPECT_EQ(buffer[3].item<float>(), 3);
  EXPECT_EQ(buffer[10].item<float>(), 10);
  buffer.reset();
  EXPECT_FALSE(weak.expired()) << "the tensor holds it";
  tensor.reset();
  EXPECT_TRUE(weak.expired());
}

TEST(StorageAccess, WithoutDataHasSizesOnly) {
  const auto tensor = without_data({3, 5}, at::kBFloat16, at::kCPU);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
  EXPECT_EQ(tensor.storage().nbytes(), 30u);
  EXPECT_TRUE(has_no_data(tensor));
  EXPECT_FALSE(has_no_data(at::empty({0}))) << "no room for elements";
  EXPECT_FALSE(has_no_data(at::empty({1})));
  EXPECT_FALSE(has_no_data(at::Tensor()));
}

TEST(StorageAccess, AReleasedTensorSaysWhyAndComesBack) {
  auto tensor = at::arange(6, at::kFloat);
  auto view = tensor.view({2, 3});
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto version = tensor._version();
  for (int round = 0; round < 3; ++round) {
    release_storage(tensor.storage(), "weight is not here");
    EXPECT_TRUE(has_no_data(tensor));
    EXPECT_TRUE(has_no_data(view));
    for (const auto& one : {tensor, view}) {
      try {
        one.add(1);
        ADD_FAILURE() << "read";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("weight is not here"), std::string::npos) << error.what();
      }
    }
    const auto buffer = at::arange(100, at::kFloat).mul(round + 1);
    gather_storage(tensor.storage(), buffer, 10 * 4);
    EXPECT_FALSE(has_no_data(tensor));
    EXPECT_EQ(tensor.const_data_ptr(), static_cast<const float*>(buffer.const_data_ptr()) + 10);
    EXPECT_TRUE(torch::equal(view, at::arange(10, 16, at::kFloat).mul(round + 1).view({2, 3})))
        << "views see refilled data";
  }
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(tensor._version(), version) << "autograd notices nothing";
  EXPECT_EQ(tensor.storage().nbytes(), 24u);
}

TEST(StorageAccess, ReleaseLetsGoOfTheBuffer) {
  auto buffer = at::ones({8});
  const auto weak = c10::weak_intrusive_ptr<c10::StorageImpl>(buffer.storage().getWeakStorageImpl());
  auto tensor = without_data({8}, at::kFloat, at::kCPU);
  gather_storage(tensor.storage(), buffer, 0);
  buffer.reset();
  EXPECT_FALSE(weak.expired());
  release_storage(tensor.storage(), "gone");
  EXPECT_TRUE(weak.expired());
}

// Tensors saved for backward share the storage, so they read its contents at that time.
TEST(StorageAccess, SavedTensorsReadRefilledData) {
  auto weight = at::full({3}, 2.f);
  auto x = at::ones({3}).requires_grad_();
  const auto loss = (x * weight).sum();
  release_storage(weight.storage(), "gone");
  gather_storage(weight.storage(), at::full({3}, 5.f), 0);
  loss.backward();
  EXPECT_TRUE(torch::equal(x.grad(), at::full({3}, 5.f)));
}

}  // namespace
}  // namespace zero::torch_hooks::storage_access_test
