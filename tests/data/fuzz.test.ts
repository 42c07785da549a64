/**
 * Random damage to images: no crash, no hang, only named errors. Small seeded counts here, 10⁶ cases under
 * MIMO_TEST_FULL; `npm run test:sanitize` runs the image decoders under ASan. The other files of a data set are in
 * tests/fuzz/parsers.
 */
import { beforeAll, expect, test } from "bun:test";
import { Images } from "../../src/native/images.ts";
import { openLibrary } from "../../src/native/library.ts";
import { UserError } from "../../src/system/errors.ts";
import { damage, generator, type Random } from "../damage.ts";
import { png } from "./fixtures.ts";
import { smallImages } from "./small-images.ts";

const cases = process.env.MIMO_TEST_FULL ? 1_000_000 : 1_500;

let images: Images;
beforeAll(async () => {
	images = new Images(await openLibrary("cpu"));
});

/** Processor time of this process: the machine's other work must not look like a hang. */
function processorSeconds(): number {
	const { user, system } = process.cpuUsage();
	return (user + system) / 1e6;
}

/** Runs `parse` on damaged inputs: it returns, or throws a named error. Returns how many were accepted. */
function fuzz(seed: number, make: (random: Random) => () => unknown): number {
	const random = generator(seed);
	let accepted = 0;
	let slowest = 0;
	for (let i = 0; i < cases; i++) {
		const parse = make(random);
		const started = processorSeconds();
		try {
			parse();
			accepted++;
		} catch (error) {
			if (!(error instanceof UserError)) throw error;
			if ((error as Error).message.length <= 10) throw error;
		}
		slowest = Math.max(slowest, processorSeconds() - started);
	}
	expect(slowest).toBeLessThan(2);
	return accepted;
}

test("JPEG and PNG files", () => {
	const files = [...Object.values(smallImages), png(7, 5)];
	for (const file of files) expect(images.decode(file).pixels.length).toBeGreaterThan(20);
	const accepted = fuzz(6, (random) => {
		const bytes = damage(files[random(files.length)]!, random);
		return () => {
			const { width, height } = images.inspect(bytes);
			// A size that the damage made huge is refused or takes long to allocate, which does not matter here.
			if (width * height > 1 << 22) throw new UserError("The image is too large for this test.");
			return images.decode(bytes);
		};
	});
	expect(accepted).toBeGreaterThan(cases / 50);
	expect(accepted).toBeLessThan(cases);
});
