// The files of a Monitor.
#include <zero/monitor.h>

#include <optional>

#include "config/settings.h"
#include "observe/csv_file.h"
#include "observe/event_file.h"

namespace zero {

struct Monitor::Files {
  std::optional<observe::EventFile> events;
  std::optional<observe::CsvFiles> csv;
};

Monitor::Monitor(const Options& options, int rank) {
  const auto& settings = options.settings();
  const auto folder = [](const config::MonitorSettings& block) {
    return std::filesystem::path(block.output_path) / block.job_name;
  };
  if (rank != 0 || (!settings.tensorboard.enabled && !settings.csv_monitor.enabled)) return;
  files_ = std::make_unique<Files>();
  if (settings.tensorboard.enabled) files_->events.emplace(folder(settings.tensorboard));
  if (settings.csv_monitor.enabled) files_->csv.emplace(folder(settings.csv_monitor));
}

Monitor::~Monitor() = default;
Monitor::Monitor(Monitor&&) noexcept = default;
Monitor& Monitor::operator=(Monitor&&) noexcept = default;

bool Monitor::active() const { return files_ != nullptr; }

void Monitor::write(const std::vector<std::pair<std::string, double>>& values, std::int64_t samples) {
  if (!files_) return;
  if (files_->events) files_->events->write(samples, values);
  if (files_->csv)
    for (const auto& [tag, value] : values) files_->csv->write(tag, samples, value);
}

}  // namespace zero
