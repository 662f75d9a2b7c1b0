// The page of `zero report`: one HTML file that opens offline. chart_data.h selects the data of charts; the page's
// script and style draw them. This file writes sections and tables, and escapes all text that comes from a run.
#pragma once
#include <string>
#include <vector>

#include "tools/report/page/run_record.h"

namespace zero::report {

// Returns the document. Runs need labels (label_runs()); order and colours follow `runs`.
std::string html_page(const std::vector<RunRecord>& runs);

// Constant parts of the document: files of the folder page, embedded by the build.
const char* page_style();
const char* page_script();

}  // namespace zero::report
