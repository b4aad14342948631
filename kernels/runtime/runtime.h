/* SPDX-License-Identifier: Apache-2.0 */
/* What the runtime's own files share; operations see pvr.h alone. */
#ifndef PVR_RUNTIME_H
#define PVR_RUNTIME_H

#include "pvr.h"

typedef struct pvr_isa_table {
    const char *name;
    const pvr_op_fn *ops;
} pvr_isa_table;

/* Generated (kernels/discover.py): instruction sets with the plainest first, ended by a NULL name. */
extern const pvr_isa_table pvr_isas[];
extern const char *const pvr_op_names[];
extern const uint32_t pvr_n_ops;

/* The functions of the instruction set in use. */
const pvr_op_fn *pvr_ops(void);

#endif
