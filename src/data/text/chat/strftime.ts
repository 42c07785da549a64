/** Dates as Python's strftime writes them in the C locale, for templates that put today's date into a conversation. */

const days = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const months = [
	...["January", "February", "March", "April", "May", "June", "July"],
	...["August", "September", "October", "November", "December"],
];
const two = (value: number) => String(value).padStart(2, "0");

/** Midnight of a day, "2026-01-31", in the format. Codes that it does not know stay as they are. */
export function strftime(date: string, format: string): string {
	const day = new Date(`${date}T00:00:00Z`);
	const month = months[day.getUTCMonth()]!;
	const weekday = days[day.getUTCDay()]!;
	const [year, number] = [String(day.getUTCFullYear()), two(day.getUTCDate())];
	const codes: Readonly<Record<string, string>> = {
		Y: year,
		y: year.slice(-2),
		m: two(day.getUTCMonth() + 1),
		d: number,
		B: month,
		b: month.slice(0, 3),
		A: weekday,
		a: weekday.slice(0, 3),
		H: "00",
		M: "00",
		S: "00",
		"%": "%",
		F: `${year}-${two(day.getUTCMonth() + 1)}-${number}`,
	};
	return format.replace(/%([a-zA-Z%])/g, (code, letter: string) => codes[letter] ?? code);
}
