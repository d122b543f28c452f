package slots

import (
	"cmp"
	"encoding/json"
	"slices"
)

// Held is what a host holds of jobs.
type Held struct {
	Snapshots []Slot `json:"snapshots"`
	Disks     []Disk `json:"disks,omitempty"`
}

// Disk is what the writer of a host does about a folder of checkpoints.
type Disk struct {
	Job     string `json:"job"`
	Folder  string `json:"folder"`
	Written int64  `json:"written"`           // step of the newest complete checkpoint; -1: none is known
	Writing *int64 `json:"writing,omitempty"` // step that is being written; nil: none
	Bytes   int64  `json:"bytes"`             // written of that so far
	// Why it does not get on, such as a full disk; empty: it does.
	Problem string  `json:"problem,omitempty"`
	Since   float64 `json:"since"` // when it began to write, or when the problem began; seconds since 1970
}

// longestProblem bounds the text of a problem in bytes.
const longestProblem = 1000

// ReadDisks returns what the writer of a job says, in the order of the folders, from the text of its file
// (torchft/checkpointing/snapshots/due.py). A file that is not understood, as of another version, says
// nothing.
func ReadDisks(job string, text []byte) []Disk {
	var told map[string]struct {
		Disk
		NBytes int64 `json:"nbytes"`
	}
	if json.Unmarshal(text, &told) != nil {
		return nil
	}
	var found []Disk
	for folder, one := range told {
		d := one.Disk
		d.Job, d.Folder, d.Bytes = job, folder, one.NBytes
		d.Problem = d.Problem[:min(len(d.Problem), longestProblem)]
		found = append(found, d)
	}
	slices.SortFunc(found, func(a, b Disk) int { return cmp.Compare(a.Folder, b.Folder) })
	return found
}

// Trouble returns the disk whose problem has lasted longest; false if no disk has one.
func Trouble(disks []Disk) (worst Disk, found bool) {
	for _, d := range disks {
		if d.Problem != "" && (!found || d.Since < worst.Since) {
			worst, found = d, true
		}
	}
	return worst, found
}
