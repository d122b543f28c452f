// Package slots decides what a slot holds. A slot is the place of one copy of a rank's state in the memory of
// a host: a file whose first page is a header. The page is zeroed before anything else is written, and
// written last, so a slot is complete only with it.
package slots

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
)

// PageSize is the size of a header in bytes.
const PageSize = 4096

const (
	format   = "TFTSLOT" // then the version, one character
	version  = '1'
	jsonFrom = len(format) + 1 + 4 + 4 // after the length and the checksum of the JSON
)

// Place is where a slot lies: ROOT/JOB/GROUP/rank-GROUPRANK/SLOT.
type Place struct {
	Job       string `json:"job"`
	Group     string `json:"group"`
	GroupRank int64  `json:"group_rank"`
	Slot      int64  `json:"slot"` // 0 or 1
}

// Slot is what a place holds.
type Slot struct {
	Place
	GroupWorldSize int64   `json:"group_world_size"`
	Step           int64   `json:"step"`
	Quorum         int64   `json:"quorum"` // in which the step was committed
	Saved          float64 `json:"saved"`  // seconds since 1970
	Bytes          int64   `json:"bytes"`  // of the file
	// Why it cannot be restored; empty: it is complete, as far as its header tells. A reader checks the
	// digests of what it reads.
	Incomplete string `json:"incomplete,omitempty"`
	// Folder on disk that the step is due in; empty if there is none.
	Folder string `json:"-"`
}

type header struct {
	Job            string  `json:"job"`
	Group          string  `json:"group"`
	GroupRank      int64   `json:"group_rank"`
	GroupWorldSize int64   `json:"group_world_size"`
	Step           int64   `json:"step"`
	Quorum         int64   `json:"quorum"`
	Saved          float64 `json:"saved"`
	NBytes         int64   `json:"nbytes"`
	Disk           *struct {
		Folder string `json:"folder"`
	} `json:"disk"`
}

// Read returns what a file at a place holds. page is the beginning of the file, PageSize bytes unless the
// file is shorter; size is its length.
func Read(at Place, page []byte, size int64) Slot {
	s := Slot{Place: at, Bytes: size}
	h, why := parse(page)
	switch {
	case why != "":
	case h.Job != at.Job || h.Group != at.Group || h.GroupRank != at.GroupRank:
		why = fmt.Sprintf("its header is that of rank %d of group %q of job %q", h.GroupRank, h.Group, h.Job)
	case h.NBytes != size:
		why = fmt.Sprintf("it has %d of %d bytes", size, h.NBytes)
	case h.GroupWorldSize <= at.GroupRank || h.Step < 0:
		why = fmt.Sprintf("its header has step %d and %d ranks", h.Step, h.GroupWorldSize)
	}
	if s.Incomplete = why; why != "" {
		return s
	}
	s.GroupWorldSize, s.Step, s.Quorum, s.Saved = h.GroupWorldSize, h.Step, h.Quorum, h.Saved
	if h.Disk != nil {
		s.Folder = h.Disk.Folder
	}
	return s
}

// parse returns the header of a page, or why it has none.
func parse(page []byte) (h header, why string) {
	switch {
	case len(page) < PageSize:
		return h, fmt.Sprintf("it has %d bytes, fewer than its header", len(page))
	case !slices.ContainsFunc(page, func(b byte) bool { return b != 0 }):
		return h, "it is being written, or its trainer ended while it wrote"
	case !bytes.HasPrefix(page, []byte(format)):
		return h, "it does not begin as a slot"
	case page[len(format)] != version:
		return h, fmt.Sprintf("its format has version %q, and this keeper reads version %q",
			page[len(format)], version)
	}
	length := binary.LittleEndian.Uint32(page[len(format)+1:])
	if length > uint32(PageSize-jsonFrom) {
		return h, fmt.Sprintf("its header says %d bytes, more than a page", length)
	}
	text := page[jsonFrom : jsonFrom+int(length)]
	if crc32.ChecksumIEEE(text) != binary.LittleEndian.Uint32(page[len(format)+5:]) {
		return h, "the checksum of its header is wrong"
	}
	if slices.ContainsFunc(page[jsonFrom+int(length):], func(b byte) bool { return b != 0 }) {
		return h, "the rest of its header is damaged"
	}
	if err := json.Unmarshal(text, &h); err != nil {
		return h, "its header is not understood: " + err.Error()
	}
	return h, ""
}

// Newest returns the newest step of which these slots have all ranks; false if there is none. Groups of a job
// have equal states, so the ranks may be of several groups. If the slots are of several jobs, it is that of
// the one that saved last.
func Newest(held []Slot) (step int64, found bool) {
	type copyOf struct{ step, ranks int64 }
	have := map[copyOf]map[int64]bool{}
	last := Slot{Saved: math.Inf(-1)}
	for _, s := range held {
		if s.Incomplete == "" && s.Saved > last.Saved {
			last = s
		}
	}
	for _, s := range held {
		if s.Incomplete != "" || s.Job != last.Job {
			continue
		}
		of := copyOf{s.Step, s.GroupWorldSize}
		if have[of] == nil {
			have[of] = map[int64]bool{}
		}
		have[of][s.GroupRank] = true
	}
	for of, ranks := range have {
		if int64(len(ranks)) == of.ranks && (!found || of.step > step) {
			step, found = of.step, true
		}
	}
	return step, found
}
