/*
 * Ctrl-C (SIGINT) as a request to stop after the current step. A JavaScript program runs its own handlers only after a call of
 * this library returns; this handler runs at once.
 *
 *     mimo_interrupts_defer("Ctrl-C: stops after this step; Ctrl-C again ends at once.\n");
 *     mimo_interrupts_asked(&asked);   // between steps
 *     mimo_interrupts_restore();
 *
 * Signals are process-wide: the state belongs to no device or stream.
 */
#pragma once

#include "library.h"

/* Maximum length of a sentence, including the terminating 0. */
#define MIMO_INTERRUPT_SENTENCE_BYTES 512

/* From now on the first SIGINT is noted and writes `sentence` to standard error (NULL: nothing). One that comes 500 ms later or
 * more ends the process as SIGINT does; earlier ones are the same key press, which a terminal and a launcher each pass on.
 * MIMO_ERROR_ARGUMENT: interrupts are deferred already, or the sentence is too long. */
MIMO_API int32_t mimo_interrupts_defer(const char* sentence);
/* *asked = 1: a SIGINT has come since mimo_interrupts_defer; else 0. */
MIMO_API int32_t mimo_interrupts_asked(int32_t* asked);
/* Restores the SIGINT handling from before mimo_interrupts_defer; no effect if interrupts are not deferred. */
MIMO_API int32_t mimo_interrupts_restore(void);
