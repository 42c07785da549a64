/** Generated from cuda/include/mimo/interrupts.h ("bun build.ts tables"); do not edit. The header says what the names mean. */

export const INTERRUPT_SENTENCE_BYTES = 512;

export const functions = {
	mimo_interrupts_defer: { args: ["ptr"], returns: "i32" },
	mimo_interrupts_asked: { args: ["ptr"], returns: "i32" },
	mimo_interrupts_restore: { args: [], returns: "i32" },
} as const;
