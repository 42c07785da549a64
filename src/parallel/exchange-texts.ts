/**
 * Exchanges texts of any length between ranks, such as names and data states. Waits for the host, so not for use within a step.
 */
import type { Group } from "./group.ts";

/** Returns every member's text, by member. Collective over the group. */
export function exchangeTexts(group: Group, text: string): string[] {
	if (group.size === 1) return [text];
	const bytes = Bun.gzipSync(new TextEncoder().encode(text));
	const lengths = group.exchange(Int32Array.of(bytes.length)).map(([length]) => length!);
	const padded = new Int32Array(Math.ceil(Math.max(...lengths) / 4));
	new Uint8Array(padded.buffer).set(bytes);
	return group.exchange(padded).map((values, member) => {
		const packed = Uint8Array.from(new Uint8Array(values.buffer, values.byteOffset, lengths[member]!));
		return new TextDecoder().decode(Bun.gunzipSync(packed));
	});
}
