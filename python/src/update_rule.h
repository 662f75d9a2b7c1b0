// A Python object as an update rule of the engine: see ClientRule in libzero/optimizers.py. The engine calls it without
// the GIL.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <zero/update_rule.h>

#include "binding.h"

namespace libzero {

class PyRule final : public zero::UpdateRule {
 public:
  // rule: its `name`, `lr` and methods states_of(parameter, shape), is_whole(), cost(), choices(), begin_step(),
  // update(pieces), end_step(). With the GIL.
  explicit PyRule(const py::object& rule)
      : rule_(held_anywhere(rule)), name_(rule.attr("name").cast<std::string>()), lr_(rule.attr("lr").cast<double>()) {}

  std::string name() const override { return name_; }
  std::vector<std::string> states(const std::string& parameter, const std::vector<std::int64_t>& shape) const override {
    const py::gil_scoped_acquire gil;
    return rule_->attr("states_of")(parameter, shape).cast<std::vector<std::string>>();
  }
  double lr() const override { return lr_; }
  Scope scope(const std::string& parameter, const std::vector<std::int64_t>& shape) const override {
    const py::gil_scoped_acquire gil;
    return rule_->attr("is_whole")(parameter, shape).cast<bool>() ? Scope::Whole : Scope::Elements;
  }
  double cost(const std::string& parameter, const std::vector<std::int64_t>& shape) const override {
    const py::gil_scoped_acquire gil;
    return rule_->attr("cost")(parameter, shape).cast<double>();
  }
  std::uint64_t choices() const override {
    const py::gil_scoped_acquire gil;
    return rule_->attr("choices")().cast<std::uint64_t>();
  }
  void begin_step() override {
    const py::gil_scoped_acquire gil;
    rule_->attr("begin_step")();
  }
  void end_step() override {
    const py::gil_scoped_acquire gil;
    rule_->attr("end_step")();
  }
  void update(std::span<zero::UpdatePiece> pieces) override {
    const py::gil_scoped_acquire gil;
    rule_->attr("update")(std::vector<zero::UpdatePiece>(pieces.begin(), pieces.end()));
  }

  static void bind(py::module_& module) {
    py::class_<zero::UpdatePiece>(module, "UpdatePiece")
        .def_readonly("parameter", &zero::UpdatePiece::parameter)
        .def_readonly("shape", &zero::UpdatePiece::shape)
        .def_readonly("begin", &zero::UpdatePiece::begin)
        .def_readonly("group", &zero::UpdatePiece::group)
        .def_readonly("lr", &zero::UpdatePiece::lr)
        .def_readonly("count", &zero::UpdatePiece::count)
        .def_readonly("master", &zero::UpdatePiece::master)
        .def_readonly("gradient", &zero::UpdatePiece::gradient)
        .def_readonly("states", &zero::UpdatePiece::states);
  }

 private:
  std::shared_ptr<py::object> rule_;
  std::string name_;
  double lr_;
};

}  // namespace libzero
