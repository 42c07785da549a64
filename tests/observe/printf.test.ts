import { expect, test } from "bun:test";
import { fixed, pythonFloat, scientific } from "../../src/observe/timers.ts";

/** Value and what Python prints for %.1f, %.3f, %.6E and str(): halves go to the even digit. */
const printed: readonly (readonly [number, string, string, string, string])[] = [
	[0, "0.0", "0.000", "0.000000E+00", "0.0"],
	[-0, "-0.0", "-0.000", "-0.000000E+00", "-0.0"],
	[0.25, "0.2", "0.250", "2.500000E-01", "0.25"],
	[0.35, "0.3", "0.350", "3.500000E-01", "0.35"],
	[0.05, "0.1", "0.050", "5.000000E-02", "0.05"],
	[0.375, "0.4", "0.375", "3.750000E-01", "0.375"],
	[-0.125, "-0.1", "-0.125", "-1.250000E-01", "-0.125"],
	[1e-7, "0.0", "0.000", "1.000000E-07", "1e-07"],
	[12.194621, "12.2", "12.195", "1.219462E+01", "12.194621"],
	[999.9995, "1000.0", "1000.000", "9.999995E+02", "999.9995"],
	[1234567.0625, "1234567.1", "1234567.062", "1.234567E+06", "1234567.0625"],
	[9.9999995, "10.0", "10.000", "9.999999E+00", "9.9999995"],
	[1e22, "10000000000000000000000.0", "10000000000000000000000.000", "1.000000E+22", "1e+22"],
	[5e-324, "0.0", "0.000", "4.940656E-324", "5e-324"],
	[Number.POSITIVE_INFINITY, "inf", "inf", "INF", "inf"],
	[Number.NEGATIVE_INFINITY, "-inf", "-inf", "-INF", "-inf"],
	[Number.NaN, "nan", "nan", "NAN", "nan"],
];

test("numbers print as Python prints them", () => {
	for (const [value, one, three, six, text] of printed) {
		expect([fixed(value, 1), fixed(value, 3), scientific(value, 6), pythonFloat(value)]).toEqual([
			one,
			three,
			six,
			text,
		]);
	}
	expect(fixed(2.5, 0)).toBe("2");
	expect(fixed(3.5, 0)).toBe("4");
	expect(scientific(2.5, 0)).toBe("2E+00");
	expect(pythonFloat(16777216)).toBe("16777216.0");
});
