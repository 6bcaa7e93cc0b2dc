// What every binding needs: checks with readable errors, the row view of a tensor, allocation, and
// the start of a kernel.
#pragma once

#include "checks.h"
#include "launch.h"
#include "ops.h"
#include "outputs.h"
#include "rows.h"
