package slots

import (
	"encoding/binary"
	"encoding/json"
	"hash/crc32"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var place = Slot{Job: "job/1", Group: "a", GroupRank: 1, Path: "a/rank-1/0"}

// page returns the header of a slot of place, with changes.
func page(t *testing.T, changes map[string]any) []byte {
	h := map[string]any{"job": "job/1", "group": "a", "group_rank": 1, "group_world_size": 2, "step": 7,
		"quorum": 3, "batches": 14, "saved": 12.5, "nbytes": 9000, "structure": []int{4096, 10, 1}, "disk": nil}
	for name, value := range changes {
		h[name] = value
	}
	text, err := json.Marshal(h)
	require.NoError(t, err)
	return paged(text)
}

func paged(text []byte) []byte {
	p := append([]byte("TFTSLOT1"), make([]byte, PageSize-8)...)
	binary.LittleEndian.PutUint32(p[8:], uint32(len(text)))
	binary.LittleEndian.PutUint32(p[12:], crc32.ChecksumIEEE(text))
	copy(p[16:], text)
	return p
}

func TestACompleteSlot(t *testing.T) {
	want := place
	want.GroupWorldSize, want.Step, want.Quorum, want.Saved, want.Bytes = 2, 7, 3, 12.5, 9000
	assert.Equal(t, want, Read(place, page(t, nil), 9000))
	disk := map[string]any{"disk": map[string]any{"folder": "/ckpt", "every": 10, "part": 0, "parts": 2}}
	assert.Equal(t, "/ckpt", Read(place, page(t, disk), 9000).Folder)
	part := map[string]any{"share": []int{2, 3, 2}}
	assert.Equal(t, []int64{2, 3, 2}, Read(place, page(t, part), 9000).Share)
}

func TestWhyASlotIsIncomplete(t *testing.T) {
	with := func(at int, value byte) []byte {
		p := page(t, nil)
		p[at] = value
		return p
	}
	for want, p := range map[string][]byte{
		"it is being written, or its trainer ended while it wrote":      make([]byte, PageSize),
		"it has 8 bytes, fewer than its header":                         page(t, nil)[:8],
		"it does not begin as a slot":                                   with(0, 'X'),
		"its format has version '2', and this keeper reads version '1'": with(7, '2'),
		"its header says":                                              with(11, 1),
		"the checksum of its header is wrong":                          with(30, 'X'),
		"its header is not understood":                                 paged([]byte(`{"step": "x"}`)),
		"its header is that of rank 0 of group \"a\" of job \"job/1\"": page(t, map[string]any{"group_rank": 0}),
		"its header is that of rank 1 of group \"b\"":                  page(t, map[string]any{"group": "b"}),
		"it has 9000 of 9001 bytes":                                    page(t, map[string]any{"nbytes": 9001}),
		"its header has step 7 and 1 ranks":                            page(t, map[string]any{"group_world_size": 1}),
		"its header has step -1":                                       page(t, map[string]any{"step": -1}),
		"its header has the share [3 3 1]":                             page(t, map[string]any{"share": []int{3, 3, 1}}),
		"its header has the share [0 3 4]":                             page(t, map[string]any{"share": []int{0, 3, 4}}),
		"its header has the share [0 3]":                               page(t, map[string]any{"share": []int{0, 3}}),
	} {
		s := Read(place, p, 9000)
		assert.Contains(t, s.Incomplete, want)
		assert.Zero(t, s.Step, "%s: no step of it is told", want)
	}
}

// A bit of the page that flips is noticed, wherever it is.
func TestAFlippedBitOfTheHeader(t *testing.T) {
	for bit := range 8 * PageSize {
		p := page(t, nil)
		p[bit/8] ^= 1 << (bit % 8)
		assert.NotEmpty(t, Read(place, p, 9000).Incomplete, "bit %d", bit)
	}
}

func TestTheNewestStepThatAllRanksHave(t *testing.T) {
	at := func(group string, rank, ranks, step int64, why string) Slot {
		return Slot{Group: group, GroupRank: rank, GroupWorldSize: ranks, Step: step, Incomplete: why}
	}
	part := func(rank int64, share ...int64) Slot {
		s := at("g", rank, 2, 6, "")
		s.Share = share
		return s
	}
	saved := func(step, quorum int64, at float64) Slot {
		return Slot{GroupWorldSize: 1, Step: step, Quorum: quorum, Saved: at}
	}
	older := []Slot{at("a", 0, 2, 5, ""), at("a", 1, 2, 5, "")}
	quorum := part(1, 1, 3, 2)
	quorum.Quorum = 9
	for _, c := range []struct {
		name string
		held []Slot
		want int64
		ok   bool
	}{
		{"nothing", nil, 0, false},
		{"one rank of two", []Slot{at("a", 0, 2, 5, "")}, 0, false},
		{"of two groups", []Slot{at("a", 0, 2, 5, ""), at("b", 1, 2, 5, "")}, 5, true},
		{"the newer one is torn", []Slot{at("a", 0, 1, 5, ""), at("a", 0, 1, 6, "torn")}, 5, true},
		{"the newer one lacks a rank",
			[]Slot{at("a", 0, 2, 5, ""), at("a", 1, 2, 5, ""), at("a", 0, 2, 6, "")}, 5, true},
		{"another world size", []Slot{at("a", 0, 2, 5, ""), at("b", 1, 3, 5, "")}, 0, false},
		{"step 0 is a step", []Slot{at("a", 0, 1, 0, "")}, 0, true},
		{"an older job has come further", []Slot{at("a", 0, 1, 5, ""),
			{Job: "new", GroupWorldSize: 1, Step: 2, Saved: 1}}, 2, true},
		{"the job has given it up", []Slot{saved(50, 1, 1), saved(30, 2, 2), saved(31, 2, 3)}, 31, true},
		{"ids begin anew", []Slot{saved(50, 7, 1), saved(90, 2, 2)}, 90, true},
		{"all parts", slices.Concat(older, []Slot{part(0, 0, 3, 2), part(0, 1, 3, 2), part(1, 0, 3, 2),
			part(1, 2, 3, 2)}), 6, true},
		{"a part of a rank is missing", slices.Concat(older, []Slot{part(0, 0, 3, 2), part(0, 1, 3, 2),
			part(1, 0, 3, 2)}), 5, true},
		{"a part of another history", slices.Concat(older, []Slot{part(0, 0, 3, 2), part(0, 1, 3, 2),
			part(1, 0, 3, 2), quorum}), 5, true},
		{"a whole copy beside a part", slices.Concat(older, []Slot{part(0), part(1, 0, 3, 2), part(1)}), 6, true},
	} {
		newest, ok := Newest(c.held)
		assert.Equal(t, c.want, newest.Step, c.name)
		assert.Equal(t, c.ok, ok, c.name)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(paged([]byte(`{"job": "job/1"}`)), int64(9000))
	f.Add(make([]byte, PageSize), int64(0))
	f.Fuzz(func(t *testing.T, p []byte, size int64) {
		s := Read(place, p, size)
		assert.Equal(t, []any{place.Job, place.Group, place.Path}, []any{s.Job, s.Group, s.Path})
		if s.Incomplete == "" {
			assert.Greater(t, s.GroupWorldSize, place.GroupRank)
			assert.GreaterOrEqual(t, s.Step, int64(0))
		}
	})
}
