/*
 * Ctrl-C (SIGINT) as a request to stop after the current step. A program that computes in calls of this library runs no
 * handler of its own until the call returns; this one runs at once, whatever the process does.
 *
 *     mimo_interrupts_defer("Ctrl-C: stops after this step; Ctrl-C again ends at once.\n");
 *     mimo_interrupts_asked(&asked);   // between steps
 *     mimo_interrupts_restore();
 *
 * Signals belong to the process: there is one such state, without a device or stream.
 */
#pragma once

#include "library.h"

/* Characters of the longest sentence, with the 0 at its end. */
#define MIMO_INTERRUPT_SENTENCE_BYTES 512

/* From now on the first SIGINT is noted and writes `sentence` to standard error (NULL: nothing). One that comes 500 ms later or
 * more ends the process as SIGINT does; earlier ones are the same key press, which a terminal and a launcher each pass on.
 * MIMO_ERROR_ARGUMENT: interrupts are deferred already, or the sentence is too long. */
MIMO_API int32_t mimo_interrupts_defer(const char* sentence);
/* *asked = 1: a SIGINT has come since mimo_interrupts_defer; else 0. */
MIMO_API int32_t mimo_interrupts_asked(int32_t* asked);
/* What SIGINT did before mimo_interrupts_defer it does again; nothing where interrupts are not deferred. */
MIMO_API int32_t mimo_interrupts_restore(void);
