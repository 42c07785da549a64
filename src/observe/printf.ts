/** Formats numbers as C's printf and Python's format do, so that log lines equal Megatron's to the last digit. */

/** Digits after the point of exact decimal expansions, sufficient for logged values. */
const exactDigits = 100;

function special(value: number): string | null {
	if (Number.isNaN(value)) return "nan";
	return Number.isFinite(value) ? null : value < 0 ? "-inf" : "inf";
}

/** printf("%.<digits>f"). */
export function fixed(value: number, digits: number): string {
	const name = special(value);
	if (name !== null) return name;
	if (Math.abs(value) >= 1e21) return BigInt(value).toString() + (digits > 0 ? `.${"0".repeat(digits)}` : "");
	const sign = value < 0 || Object.is(value, -0) ? "-" : "";
	const size = Math.abs(value);
	const exact = size.toFixed(exactDigits);
	const point = exact.indexOf(".");
	const kept = digits === 0 ? point : point + 1 + digits;
	const rounded = size.toFixed(digits);
	// JavaScript rounds exact ties up, C to the even digit.
	const tail = exact.slice(point + 1 + digits);
	if (!/^50*$/.test(tail)) return sign + rounded;
	const before = exact.slice(0, kept);
	return sign + (Number(before.at(-1)) % 2 === 0 ? before : rounded);
}

/** printf("%.<digits>E"), with an exponent of at least two digits. */
export function scientific(value: number, digits: number): string {
	const name = special(value);
	if (name !== null) return name.toUpperCase();
	const sign = value < 0 || Object.is(value, -0) ? "-" : "";
	const size = Math.abs(value);
	const split = (text: string) => text.split("e") as [string, string];
	const [exact] = split(size.toExponential(exactDigits));
	let [mantissa, exponent] = split(size.toExponential(digits));
	const kept = digits === 0 ? 1 : digits + 2;
	if (/^\.?50*$/.test(exact.slice(kept)) && Number(exact[kept - 1]) % 2 === 0) {
		mantissa = exact.slice(0, kept);
		exponent = split(size.toExponential(exactDigits))[1];
	}
	const power = Number(exponent);
	return `${sign}${mantissa}E${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}

/** Python's str() of a float, with ".0" after whole numbers. */
export function pythonFloat(value: number): string {
	const name = special(value);
	if (name !== null) return name;
	if (Number.isInteger(value) && Math.abs(value) < 1e16) return `${Object.is(value, -0) ? "-0" : value}.0`;
	const text = String(value);
	const size = Math.abs(value);
	if (size >= 1e16 || size < 1e-4) {
		const [mantissa, exponent] = value.toExponential().split("e") as [string, string];
		const power = Number(exponent);
		return `${mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
	}
	return text;
}
