/**
 * Packs a release, after `bun build.ts release`:
 *
 *   dist/release/mimo-VERSION-linux-x64.tar.zst   the executable, documentation, examples and their digits
 *   dist/release/mimo-train-VERSION.tgz           an npm package with the command mimo
 *   dist/release/mimo_train-VERSION-….whl         a wheel with the command mimo, for pip
 *
 * Needs no network. Equal contents give equal archives.
 */
import { copyFileSync, existsSync, linkSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { completionShells } from "../src/commands/completion.ts";
import { collectLicences } from "./licences.ts";

const root = join(import.meta.dir, "..");
const executable = join(root, "dist/release/mimo");
const { version, description, license, keywords } = JSON.parse(readFileSync(join(root, "package.json"), "utf8")) as {
	readonly version: string;
	readonly description: string;
	readonly license: string;
	readonly keywords: readonly string[];
};
/** The name "mimo" on npm belongs to another program. */
export const packageName = "mimo-train";
export const releaseName = `mimo-${version}-linux-x64`;
/** Any Python of a Linux with the glibc of the release (build.ts). */
const wheelTag = "py3-none-manylinux_2_28_x86_64";
export const wheelName = `${packageName.replace("-", "_")}-${version}-${wheelTag}.whl`;

/** Documentation, examples and their data. */
const documents = [
	...[
		"README.md",
		"CHANGELOG.md",
		"LICENSE",
		"NOTICE",
		"CITATION.cff",
		"docs/*.md",
		"examples/**/*.{yaml,sbatch,txt,md}",
	],
	"examples/shapes/**/*.{arrow,csv,gz,jinja,json,parquet,safetensors}",
];
/** File names under which each shell looks for completion scripts. */
const completionFiles: Readonly<Record<string, string>> = { bash: "mimo.bash", zsh: "_mimo", fish: "mimo.fish" };
const staging = join(root, "build/packaging");
/** From level 10 on compression takes twice the time for one per cent less. */
const zstdLevel = 9;

function run(command: readonly string[], folder = root, environment: Record<string, string> = {}): Buffer<ArrayBuffer> {
	const { success, stdout, stderr } = Bun.spawnSync([...command], {
		cwd: folder,
		env: { ...process.env, ...environment },
		stdout: "pipe",
		stderr: "pipe",
	});
	if (success) return Buffer.from(stdout);
	process.stderr.write(`${stdout.byteLength < 1e5 ? stdout : ""}${stderr}\npackaging: ${command.join(" ")} failed.\n`);
	process.exit(1);
}

/** Links a file, or copies it where the file system has no hard links. */
function place(from: string, to: string): void {
	mkdirSync(dirname(to), { recursive: true });
	try {
		linkSync(from, to);
	} catch {
		copyFileSync(from, to);
	}
}

/** Fills a folder with the files of the archive. */
function stageArchive(folder: string): void {
	rmSync(folder, { recursive: true, force: true });
	place(executable, join(folder, "mimo"));
	run(["bash", "examples/digits/prepare.sh"], root, { MIMO: executable });
	for (const pattern of [...documents, "runs/digits/**/*"]) {
		for (const file of new Bun.Glob(pattern).scanSync({ cwd: root, dot: true }))
			place(join(root, file), join(folder, file));
	}
	mkdirSync(join(folder, "completions"));
	for (const shell of completionShells) {
		writeFileSync(join(folder, "completions", completionFiles[shell]!), run([executable, "completion", shell]));
	}
	collectLicences(root, join(folder, "licences"));
}

/** A tar of a folder in `staging`: equal files give equal bytes. */
function tarOf(folder: string): Buffer<ArrayBuffer> {
	const reproducible = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=u=rwX,go=rX"];
	// npm refuses files of 1970, and uses this date itself.
	return run([
		"tar",
		"-C",
		staging,
		"--hard-dereference",
		...reproducible,
		"--mtime=1985-10-26 08:15:00Z",
		"-cf",
		"-",
		folder,
	]);
}

async function packArchive(): Promise<void> {
	stageArchive(join(staging, releaseName));
	const target = join(root, `dist/release/${releaseName}.tar.zst`);
	await Bun.write(target, await Bun.zstdCompress(tarOf(releaseName), { level: zstdLevel }));
}

/** Writes the npm package: no dependencies, no install scripts; its command is the executable. */
function packNpm(): void {
	const folder = join(staging, "package");
	rmSync(folder, { recursive: true, force: true });
	for (const file of ["README.md", "CHANGELOG.md", "LICENSE"]) place(join(root, file), join(folder, file));
	place(executable, join(folder, "mimo"));
	const metadata = { name: packageName, version, description, license, keywords };
	const platform = { os: ["linux"], cpu: ["x64"], libc: ["glibc"] };
	writeFileSync(
		join(folder, "package.json"),
		`${JSON.stringify({ ...metadata, ...platform, bin: { mimo: "mimo" }, files: ["mimo", "CHANGELOG.md"] }, null, "\t")}\n`,
	);
	// `npm pack` makes the same file in five times the time.
	const tar = tarOf("package");
	writeFileSync(
		join(root, `dist/release/${packageName}-${version}.tgz`),
		Bun.gzipSync(tar, { library: "libdeflate", level: 6 }),
	);
}

/** Zips the files of a folder into a wheel: the same bytes for the same files. */
const zipFolder = `
import os, sys, zipfile
folder, target = sys.argv[1:]
paths = sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
paths.sort(key=lambda path: path.endswith("RECORD"))
with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
    for path in paths:
        entry = zipfile.ZipInfo(os.path.relpath(path, folder), (1985, 10, 26, 8, 15, 0))
        entry.external_attr = (os.stat(path).st_mode & 0xFFFF) << 16
        with open(path, "rb") as file:
            archive.writestr(entry, file.read(), zipfile.ZIP_DEFLATED)
`;

/** Writes the wheel: the executable is a script of it, so that pip puts it on the PATH (PEP 427). */
function packWheel(): void {
	const folder = join(staging, "wheel");
	rmSync(folder, { recursive: true, force: true });
	const stem = `${packageName.replace("-", "_")}-${version}`;
	const info = `${stem}.dist-info`;
	place(executable, join(folder, `${stem}.data/scripts/mimo`));
	place(join(root, "LICENSE"), join(folder, info, "licenses/LICENSE"));
	const fields = [
		...[
			"Metadata-Version: 2.4",
			`Name: ${packageName}`,
			`Version: ${version}`,
			`Summary: ${description.split(". ")[0]}.`,
		],
		...[`License-Expression: ${license}`, "License-File: LICENSE", `Keywords: ${keywords.join(",")}`],
		"Description-Content-Type: text/markdown",
	];
	const texts = {
		METADATA: `${fields.join("\n")}\n\n${readFileSync(join(root, "README.md"), "utf8")}`,
		WHEEL: `Wheel-Version: 1.0\nGenerator: mimo\nRoot-Is-Purelib: false\nTag: ${wheelTag}\n`,
	};
	for (const [name, text] of Object.entries(texts)) writeFileSync(join(folder, info, name), text);
	const files = [...new Bun.Glob("**/*").scanSync({ cwd: folder, dot: true })].sort();
	const records = files.map((file) => {
		const bytes = readFileSync(join(folder, file));
		return `${file},sha256=${new Bun.CryptoHasher("sha256").update(bytes).digest("base64url")},${bytes.byteLength}`;
	});
	writeFileSync(join(folder, info, "RECORD"), `${records.join("\n")}\n${info}/RECORD,,\n`);
	run(["python3", "-c", zipFolder, folder, join(root, "dist/release", wheelName)]);
}

if (import.meta.main) {
	if (!existsSync(executable)) {
		process.stderr.write("packaging: there is no dist/release/mimo; `npm run build:release` makes it.\n");
		process.exit(1);
	}
	await packArchive();
	packNpm();
	packWheel();
}
