/** "20.3 GiB", "512 KiB". */
export function bytesText(bytes: number): string {
	const units = ["B", "KiB", "MiB", "GiB", "TiB"];
	const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
	return `${(bytes / 1024 ** power).toFixed(power < 2 ? 0 : 1)} ${units[power]}`;
}
