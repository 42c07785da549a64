/** Encodes tar members without owners and times, so that equal content gives equal bytes. */

const BLOCK = 512;

/** The end-of-archive blocks. */
export const tarEnd = new Uint8Array(2 * BLOCK);

/** Bytes of a member with `size` bytes of content in an archive. */
export function memberBytes(size: number): number {
	return BLOCK + Math.ceil(size / BLOCK) * BLOCK;
}

const template = Buffer.alloc(BLOCK);
template.write("0000644\0", 100, "latin1");
template.write("0000000\0", 108, "latin1");
template.write("0000000\0", 116, "latin1");
template.write("00000000000\0", 136, "latin1");
template.write("        ", 148, "latin1");
template.write("0", 156, "latin1");
template.write("ustar\0" + "00", 257, "latin1");
const templateSum = template.reduce((sum, byte) => sum + byte, 0);

/** Writes a member into zeroed `bytes` at `offset`; its name has at most 100 ASCII characters, its size below 8 GiB. */
export function putMember(bytes: Buffer, offset: number, name: string, content: Uint8Array): void {
	if (name.length > 100 || content.length >= 2 ** 33) throw new RangeError(`${name} does not fit a tar header.`);
	template.copy(bytes, offset);
	bytes.write(name, offset, "latin1");
	const size = content.length.toString(8).padStart(11, "0");
	bytes.write(size, offset + 124, "latin1");
	let sum = templateSum;
	for (let i = 0; i < name.length; i++) sum += name.charCodeAt(i);
	for (let i = 0; i < size.length; i++) sum += size.charCodeAt(i);
	bytes.write(`${sum.toString(8).padStart(6, "0")}\0 `, offset + 148, "latin1");
	bytes.set(content, offset + BLOCK);
}
