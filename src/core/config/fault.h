// Collects the findings of one reading, so that all are reported at once. fault.cpp formats them.
#pragma once
#include <string>
#include <vector>

#include <zero/config_tools.h>

#include "config/json_value.h"

namespace zero::config {

class Faults {
 public:
  void error(std::string id, const Place& place, std::string pointer, std::string message, std::string hint = {},
             const std::vector<Place>& related = {}) {
    add(ConfigFault::Severity::Error, std::move(id), place, std::move(pointer), std::move(message), std::move(hint),
        related);
  }
  void notice(std::string id, const Place& place, std::string pointer, std::string message, std::string hint = {}) {
    add(ConfigFault::Severity::Notice, std::move(id), place, std::move(pointer), std::move(message), std::move(hint),
        {});
  }
  bool has_errors() const;
  // In the order of the text; findings without a location come last.
  std::vector<ConfigFault> sorted() const;

 private:
  void add(ConfigFault::Severity severity, std::string id, const Place& place, std::string pointer, std::string message,
           std::string hint, const std::vector<Place>& related);
  std::vector<ConfigFault> faults_;
};

// "zero_optimization.stage" -> "/zero_optimization/stage".
std::string pointer_of(std::string_view path);

}  // namespace zero::config
