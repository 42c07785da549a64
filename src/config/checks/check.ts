/**
 * A check of a configuration: returns the key to blame and a reason, or null. It is skipped if a key that it reads is missing or
 * already refused.
 */
import type { Key, TrainingConfiguration } from "../schema.ts";

/** The key to blame, and the end of a sentence that begins with key and value. */
export interface Complaint {
	readonly key: Key;
	readonly message: string;
}

export type Check = (c: TrainingConfiguration) => Complaint | null;

export const unless = (fine: boolean, key: Key, message: string): Complaint | null => (fine ? null : { key, message });

/** Checks that `value`, of `key`, is a multiple of `by`, which the message calls `divisor`. */
export function divides(
	key: Key,
	value: (c: TrainingConfiguration) => number,
	divisor: Key | string,
	by: (c: TrainingConfiguration) => number,
): Check {
	return (c) => unless(value(c) % by(c) === 0, key, `allowed is a multiple of ${divisor} (${by(c)})`);
}
