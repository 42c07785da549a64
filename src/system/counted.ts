/** A count with its noun, "1 rank" or "2 ranks"; `plural` for nouns whose plural does not end in s alone. */
export function counted(count: number, noun: string, plural = `${noun}s`): string {
	return `${count} ${count === 1 ? noun : plural}`;
}
