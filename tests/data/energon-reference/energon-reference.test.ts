import { beforeAll, expect, test } from "bun:test";
import { Images } from "../../../src/native/images.ts";
import { openLibrary } from "../../../src/native/library.ts";
import { golden } from "../../golden.ts";
import { verifyGolden } from "./verify.ts";

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

const folder = golden("energon");

for (const part of ["rng/", "orders/", "states/", "decode.json", "behaviour.json"]) {
	test(`the reference data of megatron-energon: ${part} without a difference`, () => {
		const verdicts = [...verifyGolden(folder, images, (file) => file.includes(part))];
		expect(verdicts.filter(({ difference }) => difference !== null)).toEqual([]);
		expect(verdicts.length).toBeGreaterThan(0);
	});
}
