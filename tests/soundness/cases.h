// Every place at every stage, as the parameter of a test.
#pragma once
#include <gtest/gtest.h>

#include "soundness/ranks.h"

namespace zero::test {

struct Case {
  Place place;
  int stage;
};

inline std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return std::string(info.param.place.transport) + std::to_string(info.param.place.world) + "Stage" +
         std::to_string(info.param.stage);
}

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto& place : places())
    for (int stage = 0; stage <= 3; ++stage) cases.push_back({place, stage});
  return cases;
}

class Everywhere : public ::testing::TestWithParam<Case> {
 protected:
  void expect(const Body& body) { EXPECT_EQ(run_at(GetParam().place, body), ""); }
  int stage() const { return GetParam().stage; }
  int world() const { return GetParam().place.world; }
};

}  // namespace zero::test
