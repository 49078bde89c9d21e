// What every unit includes first. The standard library comes before any device header: an old mublas-types.h redefines
// a word that libstdc++ uses.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <vector>

#include "../include/te_hal.h"
