/** Pictures with classes instead of texts: numbers of named classes, and folders of classes. */
import { afterAll, describe, expect, test } from "bun:test";
import { join } from "node:path";
import { classNamesOf, noColumns, SkippedRow, withClassNames } from "../../../src/data/import/row.ts";
import { png, Scratch } from "../fixtures.ts";
import { golden, importing, membersOf } from "./importing.ts";

const scratch = new Scratch();
afterAll(() => scratch[Symbol.dispose]());
let count = 0;

/** Captions of the samples that an import makes, by part; its line about the form; and why rows were skipped. */
async function imported(path: string, text: string | null = null) {
	const output = join(scratch.path, `set-${count++}`);
	const said: string[] = [];
	const columns = { ...noColumns, text };
	const { skipped } = await importing(path, output, { columns, report: (line) => said.push(line) });
	const captions = Object.entries(membersOf(output)).flatMap(([name, json]) =>
		name.endsWith(".json") ? [`${name.split("-")[0]}: ${JSON.parse(json).caption}`] : [],
	);
	return {
		captions,
		form: said[0]!.replace(`${path}: `, ""),
		skipped: skipped.map(({ reason, count }) => [reason, count]),
	};
}

describe("a ClassLabel of the package datasets is trained on by its name", () => {
	for (const [name, form] of [
		["classes.parquet", "a Parquet file, with the names of the classes in label (--from parquet)"],
		["classes", "a data set of save_to_disk in one file, with the names of the classes in label (--from arrow)"],
	] as const) {
		test(name, async () => {
			const found = await imported(join(golden, name), "label");
			expect(found.captions).toEqual(["train: red fox", "train: cat", "train: dog"]);
			expect(found.form).toBe(form);
			// −1 and null are no class.
			expect(found.skipped).toEqual([["it has neither a conversation nor text", 2]]);
		});
	}

	test("a number without a name is none", () => {
		const classes = classNamesOf({ a: { _type: "ClassLabel", names: ["x"] }, b: { _type: "Value" }, c: null, d: 1 });
		expect([...classes]).toEqual([["a", ["x"]]]);
		expect(withClassNames({ a: 0n, b: 0 }, classes)).toEqual({ a: "x", b: 0 });
		expect(withClassNames({ a: "x" }, classes)).toEqual({ a: "x" });
		const refused = withClassNames({ a: 7 }, classes);
		expect([refused instanceof SkippedRow, (refused as SkippedRow).message]).toEqual([
			true,
			"its class 7 in the column a has no name: there are 1",
		]);
	});
});

describe("folders of classes", () => {
	test("are the captions of their pictures, within the parts of the data set", async () => {
		for (const [i, name] of ["train/cat/1", "train/red fox/2", "val/cat/3", "train/4", "5"].entries()) {
			scratch.file(`animals/${name}.png`, png(8, 8, i));
		}
		const { captions, form, skipped } = await imported(join(scratch.path, "animals"));
		expect(captions).toEqual(["train: cat", "train: red fox", "val: cat"]);
		expect(form).toBe("pictures in folders of 2 classes, whose names are the captions (--from pictures)");
		expect(skipped).toEqual([["it has no .txt or .json file of the same name beside it", 2]]);
	});

	test("are none where a picture has a text, or all are in one folder", async () => {
		for (const name of ["mixed/a/1", "mixed/b/2", "one/images/1", "one/images/2"]) {
			scratch.file(`${name}.png`, png(8, 8));
		}
		scratch.file("mixed/a/1.txt", "a text");
		const { captions, form, skipped } = await imported(join(scratch.path, "mixed"));
		expect([captions, form]).toEqual([["train: a text"], "a folder of pictures (--from pictures)"]);
		expect(skipped).toHaveLength(1);
		await expect(imported(join(scratch.path, "one"))).rejects.toThrow("it has no .txt or .json file of the same name");
	});
});
