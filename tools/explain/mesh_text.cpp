// See mesh_text.h.
#include "tools/explain/mesh_text.h"

#include "base/check.h"
#include "tools/report/text/table.h"
#include "tools/report/text/text.h"

namespace zero::cli {
namespace {

std::string size_of(std::int64_t bytes) { return report::human_bytes(static_cast<std::uint64_t>(bytes)); }

// What an exchange of a product sends: "g: all-reduce, 8.00KiB".
std::string exchange_text(const planning::SplitProduct::Exchange& e) {
  if (e.operation.empty()) return "-";
  return base::join(e.name.empty() ? "" : e.name + ": ", e.operation, ", ", size_of(e.bytes));
}

Json exchange_json(const planning::SplitProduct::Exchange& e) {
  if (e.operation.empty()) return nullptr;
  return {{"name", e.name}, {"operation", e.operation}, {"of", e.of}, {"sent_bytes", e.bytes}};
}

}  // namespace

std::string experts_text(const PlanExperts& experts, std::int64_t layers, int ranks, bool data_before_experts) {
  const auto each = base::join("Each of ", layers, layers == 1 ? " layer has " : " layers has ", experts.count,
                               " experts, of which a token takes ", experts.k, ". ");
  const int ep = experts.ep_size, copies = ranks / ep;
  if (ep == 1) return each + "Every rank has all of them, in the unit of their layer.";
  const auto apart = [&](int count, int distance) {
    return count == 1      ? std::string("one rank")
           : distance == 1 ? base::join(count, " consecutive ranks")
                           : base::join(count, " ranks at a distance of ", distance);
  };
  return base::join(each, "A rank has ", experts.count / ep,
                    ", as a unit of their own, blocks.N.mlp.experts. ep: ", apart(ep, data_before_experts ? copies : 1),
                    " have different ones and exchange rows of tokens by all-to-all. edp: ",
                    apart(copies, data_before_experts ? 1 : ep),
                    copies == 1 ? " has them alone: their states are not sharded, their gradients not summed."
                                : " have the same ones, and share their states and sum their gradients.");
}

std::string products_text(const std::vector<planning::SplitProduct>& products, std::size_t columns) {
  report::Table table(
      {{"weight"}, {"cut"}, {"a rank has", report::Align::Right}, {"forward: output"}, {"backward: input's gradient"}});
  for (const auto& product : products)
    table.row({product.weight, product.row ? "row" : "column", base::join(product.part[0], " x ", product.part[1]),
               exchange_text(product.forward), exchange_text(product.backward)});
  return table.render(columns);
}

std::string exchanges_text(const std::vector<planning::Exchange>& exchanges, std::size_t columns) {
  report::Table table({{"phase"},
                       {"operation"},
                       {"of", report::Align::Left, report::Column::Narrow::Wrap, 12},
                       {"calls", report::Align::Right},
                       {"sent", report::Align::Right}});
  for (const auto& e : exchanges)
    table.row({e.phase, e.operation, e.purpose, std::to_string(e.calls), size_of(e.bytes)});
  return table.render(columns);
}

Json products_json(const std::vector<planning::SplitProduct>& products) {
  Json all = Json::array();
  for (const auto& product : products)
    all.push_back({{"weight", product.weight},
                   {"cut", product.row ? "row" : "column"},
                   {"sizes_a_rank", product.part},
                   {"forward", exchange_json(product.forward)},
                   {"backward", exchange_json(product.backward)}});
  return all;
}

Json exchanges_json(const std::vector<planning::Exchange>& exchanges) {
  Json all = Json::array();
  for (const auto& e : exchanges)
    all.push_back({{"phase", e.phase},
                   {"operation", e.operation},
                   {"purpose", e.purpose},
                   {"calls", e.calls},
                   {"sent_bytes", e.bytes}});
  return all;
}

}  // namespace zero::cli
