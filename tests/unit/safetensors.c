// SPDX-License-Identifier: MIT
/*
 * The safetensors reader: every conformance file's verdict and kind of refusal,
 * values at awkward offsets, limits that no small file reaches, and indexes of
 * shards that do not agree with their shards.
 */
#include <check.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvtier.h"
#include "lib/weightfile.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/weights.h"

static struct kvt_weights *open_ok(const char *path)
{
	struct kvt_weights *w;

	ck_assert_msg(kvt_weights_open(path, &w) == 0, "%s", kvt_last_error());
	return w;
}

static void refuse(const char *path, int err, const char *words)
{
	struct kvt_weights *w;
	int got = kvt_weights_open(path, &w);

	ck_assert_msg(got == err, "%s: %d, not %d", path, got, err);
	ck_assert_ptr_null(w);
	ck_assert_msg(strstr(kvt_last_error(), words) != NULL, "\"%s\" lacks \"%s\"", kvt_last_error(), words);
}

static const struct kvt_tensor *find(const struct kvt_weights *w, const char *name)
{
	const struct kvt_tensor *t = kvt_weights_find(w, name);

	ck_assert_msg(t != NULL, "no tensor %s", name);
	return t;
}

/* One tensor entry, with or without data, as a file. */
static const char *one(const char *header, size_t data_bytes)
{
	struct bytes b = { 0 }, data = { 0 };

	put_pattern(&data, data_bytes, 1);
	put_safetensors(&b, header, data.p, data.n);
	free(data.p);
	return write_bytes("one.safetensors", &b);
}

/* The words that each kind of refusal must hold. */
static const char *words_of(const char *kind)
{
	static const char *const table[][2] = {
		{ "HeaderTooSmall", "too few for a safetensors file" },
		{ "HeaderTooLarge", "at most 100000000 are allowed" },
		{ "InvalidHeaderLength", "the file ends after" },
		{ "InvalidHeader", "not valid UTF-8" },
		{ "InvalidOffset", "data_offsets" },
		{ "MetadataIncompleteBuffer", "cut off" },
		{ "TensorInvalidInfo", "data_offsets give" },
		{ "ValidationOverflow", "2^64 elements" },
		{ "MisalignedSlice", "do not fill whole bytes" },
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++)
		if (!strcmp(table[i][0], kind))
			return table[i][1];
	return "";
}

START_TEST(conformance)
{
	const char *list = input("conformance", "safetensors/conformance/EXPECTED.tsv");
	char line[512], path[600], dir[512];
	int n = 0;
	FILE *f;

	if (!list)
		return;
	snprintf(dir, sizeof(dir), "%.*s", (int)(strrchr(list, '/') - list), list);
	f = fopen(list, "r");
	ck_assert_ptr_nonnull(f);
	ck_assert_ptr_nonnull(fgets(line, sizeof(line), f)); /* titles */
	while (fgets(line, sizeof(line), f)) {
		char *file = strtok(line, "\t"), *expected = strtok(NULL, "\t");
		struct kvt_weights *w;
		int err;

		n++;
		snprintf(path, sizeof(path), "%s/%s", dir, file);
		err = kvt_weights_open(path, &w);
		if (!strcmp(expected, "OK") || !strcmp(expected, "OK or reject")) {
			/* where both are allowed, what the reference implementation loads is loaded */
			ck_assert_msg(!err, "%s is refused: %s", file, kvt_last_error());
			for (uint32_t i = 0; i < w->n_tensors; i++) {
				void *p = malloc(w->tensors[i].bytes + 1);

				ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[i], 0, w->tensors[i].bytes, p), 0);
				free(p);
			}
		} else {
			ck_assert_msg(err == -EINVAL, "%s is not refused", file);
			ck_assert_msg(strstr(kvt_last_error(), file) != NULL, "%s: no file name: %s", file,
				      kvt_last_error());
			ck_assert_msg(strstr(kvt_last_error(), words_of(expected)) != NULL, "%s: \"%s\" lacks \"%s\"", file,
				      kvt_last_error(), words_of(expected));
		}
		kvt_weights_close(w);
	}
	fclose(f);
	ck_assert_int_ge(n, 97);
}
END_TEST

START_TEST(conformance_values)
{
	uint8_t byte;
	struct kvt_weights *w;
	const struct kvt_tensor *t;
	float f[2050];
	uint64_t i;

	if (!input("conformance_values", "safetensors/conformance/EXPECTED.tsv"))
		return;
	w = open_ok(input("", "safetensors/conformance/ok_header_order_reversed.safetensors"));
	ck_assert_str_eq(w->tensors[0].name, "a"); /* by place, not as the header has them */
	kvt_weights_close(w);

	w = open_ok(input("", "safetensors/conformance/ok_5000_tensors.safetensors"));
	t = find(w, "t4999");
	ck_assert_int_eq(kvt_tensor_read(w, t, 0, 1, &byte), 0);
	ck_assert_uint_eq(byte, 0x87);
	ck_assert_ptr_null(kvt_weights_find(w, "t5000"));
	kvt_weights_close(w);

	w = open_ok(input("", "safetensors/conformance/ok_all_dtypes.safetensors"));
	for (i = 0; i < KVT_DT_SAFETENSORS; i++) {
		uint32_t block, bytes, n = 0;

		kvt_dtype_block(i, &block, &bytes);
		for (uint32_t j = 0; j < w->n_tensors; j++)
			if (w->tensors[j].dtype == i) {
				ck_assert_uint_eq(w->tensors[j].bytes, 8 / block * bytes);
				n++;
			}
		ck_assert_uint_eq(n, 1);
	}
	kvt_weights_close(w);

	w = open_ok(input("", "safetensors/conformance/ok_data_over_4096.safetensors"));
	t = find(w, "b");
	ck_assert_uint_eq(t->elements, 2050);
	ck_assert_int_eq(kvt_tensor_read_f32(w, t, 0, t->elements, f), 0);
	for (i = 0; i < t->elements; i++)
		ck_assert_float_eq(f[i], 1023 + i);
	kvt_weights_close(w);

	w = open_ok(input("", "safetensors/conformance/ok_metadata.safetensors"));
	ck_assert_uint_eq(w->n_meta, 1);
	ck_assert_uint_eq(w->meta[0].type, KVT_META_STRING);
	kvt_weights_close(w);
}
END_TEST

START_TEST(names_and_metadata)
{
	struct kvt_weights *w;
	struct kvt_text text;
	uint64_t u;
	double d;

	w = open_ok(one("{\"__metadata__\":{\"format\":\"pt\",\"layers\":\"12\",\"a\\u0000b\":\"\\ud83e\\udde0\\n\"},"
			"\"n\\u0000x\":{\"shape\":[1],\"dtype\":\"U8\",\"data_offsets\":[0,1]},"
			"\"n\":{\"dtype\":\"U8\",\"data_offsets\":[1,3],\"shape\":[1,2]}}", 3));
	ck_assert_uint_eq(w->n_tensors, 2);
	ck_assert_uint_eq(find(w, "n")->rank, 2); /* not taken for "n\0x" */
	ck_assert_uint_eq(w->tensors[0].name_len, 3);
	ck_assert_int_eq(kvt_weights_text(w, "format", 0, &text), 0);
	ck_assert_str_eq(text.s, "pt");
	ck_assert_int_eq(kvt_weights_uint(w, "layers", 0, &u), 0);
	ck_assert_uint_eq(u, 12);
	ck_assert_int_eq(kvt_weights_uint(w, "format", 0, &u), -EINVAL);
	ck_assert_int_eq(kvt_weights_number(w, "format", 0, &d), -EINVAL);
	ck_assert_int_eq(kvt_weights_text(w, "format", 1, &text), -ERANGE);
	ck_assert_int_eq(kvt_weights_text(w, "formats", 0, &text), -ENOENT);
	ck_assert_int_eq(kvt_weights_count(w, "format"), -EINVAL);
	ck_assert_uint_eq(w->meta[2].key.len, 3);
	ck_assert_str_eq(w->meta[2].text.s, "\xf0\x9f\xa7\xa0\n");
	kvt_weights_close(w);

	refuse(one("{\"__metadata__\":{\"a\":\"1\",\"\\u0061\":\"1\"}}", 0), -EINVAL, "metadata \"a\" comes twice");
	refuse(one("{\"\\ud800\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1), -EINVAL, "surrogate");
	refuse(one("{\"a\x01\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1), -EINVAL, "byte 0x01");
	/* the same name twice without an overlap, also when written in another way */
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
		   "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2), -EINVAL, "comes twice");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
		   "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1), -EINVAL, "comes twice");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1), -EINVAL,
	       "\"dtype\" comes twice");
}
END_TEST

START_TEST(integers)
{
	struct kvt_weights *w;

	/* up to 2^64 - 1 where the product stays small */
	w = open_ok(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[0,18446744073709551615],\"data_offsets\":[0,0]}}", 0));
	ck_assert_uint_eq(w->tensors[0].shape[1], UINT64_MAX);
	ck_assert_uint_eq(w->tensors[0].elements, 0);
	kvt_weights_close(w);
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[0,18446744073709551616],\"data_offsets\":[0,0]}}", 0), -EINVAL,
	       "below 2^64");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[01],\"data_offsets\":[0,1]}}", 1), -EINVAL, "leading zeros");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[-0],\"data_offsets\":[0,0]}}", 0), -EINVAL, "whole number");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[1e0],\"data_offsets\":[0,1]}}", 1), -EINVAL, "whole number");
	refuse(one("{\"a\":{\"dtype\":\"F64\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0), -EINVAL,
	       "2^64 bytes");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2), -EINVAL, "end at byte 1");
	refuse(one("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
		   "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[4,2]}}", 4), -EINVAL, "end before they begin");
}
END_TEST

/* Nesting and rank have no limit in the format; ours for nesting is the reference implementation's. */
START_TEST(deep_and_wide)
{
	struct bytes h = { 0 };
	struct kvt_weights *w;

	for (int depth = 128; depth <= 129; depth++) {
		put_text(&h, "{\"a\":{\"x\":");
		for (int i = 0; i < depth; i++)
			put_text(&h, "[");
		for (int i = 0; i < depth; i++)
			put_text(&h, "]");
		put_text(&h, ",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}");
		put(&h, "", 1);
		if (depth == 128)
			kvt_weights_close(open_ok(one((char *)h.p, 1)));
		else
			refuse(one((char *)h.p, 1), -EINVAL, "128 levels");
		h.n = 0;
	}
	put_text(&h, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1");
	for (int i = 1; i < 100000; i++)
		put_text(&h, ",1");
	put_text(&h, "],\"data_offsets\":[0,1]}}");
	put(&h, "", 1);
	w = open_ok(one((char *)h.p, 1));
	ck_assert_uint_eq(w->tensors[0].rank, 100000);
	kvt_weights_close(w);
	free(h.p);
}
END_TEST

/* A header of exactly the limit loads in memory near its own size; one byte more is refused unread. */
START_TEST(header_of_100_mb)
{
	const char *path = scratch("big.safetensors");
	const uint64_t limit = 100000000;
	const char head[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"__metadata__\":{\"pad\":\"";
	struct kvt_weights *w;
	struct rusage before, after;
	struct kvt_text pad;
	FILE *f;

	for (uint64_t n = limit; n <= limit + 1; n++) {
		char *fill = malloc(n);

		f = fopen(path, "w");
		memset(fill, 'x', n);
		memcpy(fill, head, sizeof(head) - 1);
		memcpy(fill + n - 3, "\"}}", 3);
		ck_assert_uint_eq(fwrite(&n, 8, 1, f) + fwrite(fill, 1, n, f) + fwrite("z", 1, 1, f), n + 2);
		ck_assert_int_eq(fclose(f), 0);
		free(fill);
		getrusage(RUSAGE_SELF, &before);
		if (n > limit) {
			refuse(path, -EINVAL, "100000001 bytes");
			break;
		}
		w = open_ok(path);
		ck_assert_int_eq(kvt_weights_text(w, "pad", 0, &pad), 0);
		ck_assert_uint_eq(pad.len, n - sizeof(head) + 1 - 3);
		kvt_weights_close(w);
		getrusage(RUSAGE_SELF, &after);
		ck_assert_int_le(after.ru_maxrss - before.ru_maxrss, 110000);
	}
	unlink(path);
}
END_TEST

START_TEST(changes_while_read)
{
	static const char header[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[10000],\"data_offsets\":[0,10000]}}";
	uint8_t out[10000];
	struct kvt_weights *w;
	const char *path;
	int fd;

	path = one(header, 10000);
	w = open_ok(path);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, 10000, out), 0);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 1, 10000, out), -ERANGE);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], UINT64_MAX, 2, out), -ERANGE);
	ck_assert_int_eq(truncate(path, 5000), 0);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, 10000, out), -ESTALE);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, 10, out), -ESTALE); /* its bytes are still there */
	kvt_weights_close(w);

	path = one(header, 10000);
	w = open_ok(path);
	fd = open(path, O_WRONLY | O_APPEND);
	ck_assert_int_eq(write(fd, "x", 1), 1);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, 10000, out), -ESTALE);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "one.safetensors"));
	kvt_weights_close(w);
	close(fd);

	/* same size, other bytes */
	path = one(header, 10000);
	w = open_ok(path);
	usleep(20000); /* a tick of the file system's clock */
	fd = open(path, O_WRONLY);
	ck_assert_int_eq(pwrite(fd, "x", 1, 9000), 1);
	close(fd);
	ck_assert_int_eq(kvt_tensor_read(w, &w->tensors[0], 0, 100, out), -ESTALE);
	kvt_weights_close(w);
}
END_TEST

START_TEST(floats)
{
	static const uint16_t half[] = { 0x3c00, 0xc000, 0x7c00, 0x0001 }, brain[] = { 0x3f80, 0xc000, 0x7f80, 0x0001 };
	static const float want[] = { 1, -2, INFINITY };
	struct bytes b = { 0 }, data = { 0 };
	struct kvt_weights *w;
	float f[4];

	put(&data, "?", 1); /* everything at odd offsets */
	put(&data, half, 8);
	put(&data, brain, 8);
	put(&data, want, 12);
	put_safetensors(&b, "{\"o\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[0,1]},"
			    "\"h\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[1,9]},"
			    "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[9,17]},"
			    "\"f\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[17,29]}}", data.p, data.n);
	free(data.p);
	w = open_ok(write_bytes("floats.safetensors", &b));
	ck_assert_int_eq(kvt_tensor_read_f32(w, find(w, "h"), 0, 4, f), 0);
	ck_assert_mem_eq(f, want, 12);
	ck_assert(f[3] == 0x1p-24f);
	ck_assert_int_eq(kvt_tensor_read_f32(w, find(w, "b"), 1, 3, f), 0);
	ck_assert_mem_eq(f, want + 1, 8);
	ck_assert_int_eq(kvt_tensor_read_f32(w, find(w, "f"), 0, 3, f), 0);
	ck_assert_mem_eq(f, want, 12);
	ck_assert_int_eq(kvt_tensor_read_f32(w, find(w, "f"), 1, 3, f), -ERANGE);
	ck_assert_int_eq(kvt_tensor_read_f32(w, find(w, "o"), 0, 1, f), -ENOTSUP);
	ck_assert_ptr_nonnull(strstr(kvt_last_error(), "\"o\" is BOOL"));
	kvt_weights_close(w);
}
END_TEST

/* ---- shards ---- */

#define ENTRY(name, begin, end) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" #begin "," #end "]}"

static void write_shards(const char *index)
{
	struct bytes b = { 0 };

	put_safetensors(&b, "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("x", 0, 2) "," ENTRY("y", 2, 4) "}", "1234", 4);
	write_bytes("s-1.safetensors", &b);
	put_safetensors(&b, "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("z", 0, 2) "}", "56", 2);
	write_bytes("s-2.safetensors", &b);
	write_file("model.safetensors.index.json", index, strlen(index));
}

static void refuse_index(const char *index, int err, const char *words)
{
	write_shards(index);
	refuse(scratch_dir(), err, words);
}

#define X "\"x\":\"s-1.safetensors\""
#define Y "\"y\":\"s-1.safetensors\""
#define Z "\"z\":\"s-2.safetensors\""
#define INDEX(total, map) "{\"metadata\":{\"total_size\":" total "},\"weight_map\":{" map "}}"

START_TEST(shards)
{
	struct kvt_weights *w;
	struct bytes b = { 0 };
	char two[2];

	write_shards(INDEX("6", X "," Y "," Z));
	w = open_ok(scratch_dir());
	ck_assert_uint_eq(w->n_shards, 2);
	ck_assert_uint_eq(w->n_tensors, 3);
	ck_assert_uint_eq(w->bytes, 6);
	ck_assert_int_eq(kvt_tensor_read(w, find(w, "z"), 0, 2, two), 0);
	ck_assert_mem_eq(two, "56", 2);
	ck_assert_int_eq(kvt_tensor_read(w, find(w, "y"), 0, 2, two), 0);
	ck_assert_mem_eq(two, "34", 2);
	kvt_weights_close(w);
	/* the index by its own name, a total in floats, and none */
	write_shards(INDEX("6.0", X "," Y "," Z));
	kvt_weights_close(open_ok(scratch("model.safetensors.index.json")));
	write_shards("{\"weight_map\":{" X "," Y "," Z "}}");
	kvt_weights_close(open_ok(scratch_dir()));

	refuse_index(INDEX("7", X "," Y "," Z), -EINVAL, "total_size is 7, the shards' tensors have 6 bytes");
	refuse_index(INDEX("6.5", X "," Y "," Z), -EINVAL, "total_size");
	refuse_index(INDEX("-6", X "," Y "," Z), -EINVAL, "total_size");
	refuse_index(INDEX("6", X "," Y "," Z ",\"v\":\"s-2.safetensors\""), -EINVAL,
		     "tensor \"v\" should be in s-2.safetensors, which does not have it");
	refuse_index(INDEX("6", X "," Z), -EINVAL, "tensor \"y\"");
	refuse_index(INDEX("6", X ",\"y\":\"s-2.safetensors\"," Z), -EINVAL,
		     "tensor \"y\" should be in s-2.safetensors, it is in s-1.safetensors");
	refuse_index(INDEX("6", X "," Y "," Z "," X), -EINVAL, "tensor \"x\": the name comes twice");
	refuse_index(INDEX("6", X "," Y "," Z ",\"v\":\"s-3.safetensors\""), -ENOENT, "s-3.safetensors");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"../s-2.safetensors\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"/etc/passwd\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"..\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"s-2.safetensors\\u0000\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":\"s-2\\n.safetensors\""), -EINVAL, "not the name of a file beside");
	refuse_index(INDEX("6", X "," Y ",\"z\":1"), -EINVAL, "file name in double quotes");
	refuse_index("{\"metadata\":{}}", -EINVAL, "no \"weight_map\"");
	refuse_index("{\"weight_map\":{},\"weight_map\":{}}", -EINVAL, "comes twice");
	refuse_index("{\"weight_map\":[]}", -EINVAL, "weight_map in braces");
	refuse_index("", -EINVAL, "expected '{', found the end");

	/* a tensor in two shards */
	write_shards(INDEX("8", X "," Y "," Z));
	put_safetensors(&b, "{" ENTRY("x", 0, 2) "," ENTRY("z", 2, 4) "}", "1256", 4);
	write_bytes("s-2.safetensors", &b);
	refuse(scratch_dir(), -EINVAL, "tensor \"x\" is in two shards");
	/* a shard cut short, and one that is a directory */
	write_shards(INDEX("6", X "," Y "," Z));
	ck_assert_int_eq(truncate(scratch("s-2.safetensors"), 80), 0);
	refuse(scratch_dir(), -EINVAL, "s-2.safetensors");
	ck_assert_int_eq(unlink(scratch("s-2.safetensors")), 0);
	ck_assert_int_eq(mkdir(scratch("s-2.safetensors"), 0700), 0);
	refuse(scratch_dir(), -EINVAL, "not a regular file");
	ck_assert_int_eq(rmdir(scratch("s-2.safetensors")), 0);
	/* one file goes before an index */
	put_safetensors(&b, "{" ENTRY("only", 0, 2) "}", "12", 2);
	write_bytes("model.safetensors", &b);
	w = open_ok(scratch_dir());
	find(w, "only");
	kvt_weights_close(w);
	unlink(scratch("model.safetensors"));
	unlink(scratch("model.safetensors.index.json"));
	refuse(scratch_dir(), -ENOENT, "neither model.safetensors nor");
}
END_TEST

START_TEST(not_files)
{
	const char *fifo = scratch("fifo.safetensors");

	refuse(scratch("absent.safetensors"), -ENOENT, "absent.safetensors");
	ck_assert_int_eq(mkfifo(fifo, 0600), 0);
	refuse(fifo, -EINVAL, "not a regular file"); /* and does not wait for a writer */
	unlink(fifo);
}
END_TEST

START_TEST(utf8)
{
	static const char *const good[] = { "", "a", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
					    "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf" };
	static const char *const bad[] = { "\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
					   "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc2", "\xe2\x82", "\xf0\x9f\xa7" };

	for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++)
		ck_assert(kvt_utf8_valid(good[i], strlen(good[i])));
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
		ck_assert(!kvt_utf8_valid(bad[i], strlen(bad[i])));
}
END_TEST

int main(void)
{
	Suite *s = suite_create("safetensors");
	TCase *t = tcase_create("safetensors");
	SRunner *r = srunner_create(s);
	int failed;

	scratch_dir();
	tcase_set_timeout(t, 60);
	tcase_add_test(t, conformance);
	tcase_add_test(t, conformance_values);
	tcase_add_test(t, names_and_metadata);
	tcase_add_test(t, integers);
	tcase_add_test(t, deep_and_wide);
	tcase_add_test(t, header_of_100_mb);
	tcase_add_test(t, changes_while_read);
	tcase_add_test(t, floats);
	tcase_add_test(t, shards);
	tcase_add_test(t, not_files);
	tcase_add_test(t, utf8);
	suite_add_tcase(s, t);
	srunner_run_all(r, CK_NORMAL);
	failed = srunner_ntests_failed(r);
	srunner_free(r);
	return failed != 0;
}
