// `zero models`: the models that have a name, and the config.json of one of them, or of a folder, as it is understood.
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include <zero/errors.h>

#include "base/json_write.h"
#include "models/hf_config.h"
#include "tools/commands.h"
#include "tools/report/text/table.h"
#include "tools/report/text/terminal.h"
#include "tools/report/text/text.h"
#include "tools/support/options.h"

namespace zero::cli {
namespace {

using base::json_quote;

struct Row {
  std::string name, type;
  std::int64_t parameters = 0, layers = 0, hidden = 0, vocabulary = 0;  // vocabulary 0: none
};

Row row_of(const std::string& name) {
  const auto config = models::hf_preset(name).config;
  Row row{.name = name, .type = models::model_type(config)};
  std::visit(
      [&](const auto& shape) {
        using Shape = std::decay_t<decltype(shape)>;
        row.parameters = shape.num_parameters();
        row.hidden = shape.hidden;
        if constexpr (std::is_same_v<Shape, models::T5Config>)
          row.layers = shape.encoder_layers + shape.decoder_layers;
        else
          row.layers = shape.layers;
        if constexpr (!std::is_same_v<Shape, models::VitConfig>) row.vocabulary = shape.vocabulary;
      },
      config);
  return row;
}

std::string table_of(const std::vector<Row>& rows) {
  using report::Align;
  report::Table table({{.name = "model"},
                       {.name = "type"},
                       {.name = "parameters", .align = Align::Right},
                       {.name = "layers", .align = Align::Right},
                       {.name = "hidden", .align = Align::Right},
                       {.name = "vocabulary", .align = Align::Right}});
  for (const auto& row : rows)
    table.row({row.name, row.type, report::human_parameters(static_cast<double>(row.parameters)),
               std::to_string(row.layers), std::to_string(row.hidden),
               row.vocabulary > 0 ? std::to_string(row.vocabulary) : "-"});
  return table.render();
}

std::string json_of(const std::vector<Row>& rows) {
  std::string text = R"({"schema": "zero.models/1", "models": [)";
  for (const auto& row : rows) {
    text += (&row == rows.data() ? "\n" : ",\n") + std::string("  {\"name\": ") + json_quote(row.name) +
            ", \"type\": " + json_quote(row.type) + ", \"parameters\": " + std::to_string(row.parameters) +
            ", \"layers\": " + std::to_string(row.layers) + ", \"hidden\": " + std::to_string(row.hidden) +
            ", \"vocabulary\": " + (row.vocabulary > 0 ? std::to_string(row.vocabulary) : "null") + "}";
  }
  return text + "\n]}\n";
}

}  // namespace
}  // namespace zero::cli

int zero_models(int argc, char** argv) {
  using namespace zero::cli;
  std::string name;
  Command command("models", "Lists the models that have a name; with NAME prints that model's config.json.",
                  "[NAME|DIR] [options]", "zero models llama-110m > config.json");
  command.positional(name, "NAME|DIR", "a model's name, or a folder with a config.json, as it is understood", false);
  if (!command.parse(argc, argv)) return 0;
  if (name.empty()) {
    std::vector<Row> rows;
    for (const auto& each : models::hf_preset_names()) rows.push_back(row_of(each));
    print_result(command.global().json ? json_of(rows) : table_of(rows));
    return 0;
  }
  try {
    if (!models::is_hf_path(name)) {
      print_result(models::hf_config_text(models::hf_preset(name)));
      return 0;
    }
    const auto config = models::read_hf_config(name);
    std::string unknown;
    for (const auto& key : config.unknown) unknown += (unknown.empty() ? "" : ", ") + key;
    if (!unknown.empty())
      print_note("models", zero::LogLevel::Warning, name + " has keys that are of no effect here: " + unknown);
    const auto names = models::hf_preset_names();
    if (std::find(names.begin(), names.end(), name) != names.end())
      print_note("models", zero::LogLevel::Warning, name + " is the path here, not the model of that name");
    print_result(models::hf_config_text(config));
  } catch (const std::invalid_argument& error) {
    throw zero::ConfigError(std::string("[zero models] ") + error.what());
  }
  return 0;
}
