package slots

import "encoding/json"

// Stored is what a host has on a disk that only it sees: slots with parts of states
// (torchft/checkpointing/snapshots/stored.py).
type Stored struct {
	Folder string // of the job's checkpoints
	Slots  []Slot // whose Stored is set
}

// mostStored bounds the slots of a folder, and longestPath their names below it, in bytes.
const mostStored, longestPath = 200, 1000

// ReadStored returns what the ranks of a job have stored, from the text of its file. One that is not
// understood, as of another version, says nothing.
func ReadStored(job string, text []byte) Stored {
	var told struct {
		Folder string `json:"folder"`
		Slots  []Slot `json:"slots"`
	}
	if json.Unmarshal(text, &told) != nil {
		return Stored{}
	}
	found := Stored{Folder: told.Folder}
	for _, s := range told.Slots {
		s.Job, s.Stored, s.Incomplete = job, true, ""
		ok := s.GroupRank >= 0 && s.GroupWorldSize > s.GroupRank && s.Step >= 0 && ValidShare(s.Share)
		if ok && s.Path != "" && len(s.Path) <= longestPath && len(found.Slots) < mostStored {
			found.Slots = append(found.Slots, s)
		}
	}
	return found
}

// Complete returns, for each job of which a host has stored slots, the newest step of which all hosts
// together have stored all.
func Complete(host, all []Slot) map[string]int64 {
	steps := map[string]int64{}
	for _, own := range host {
		if _, known := steps[own.Job]; known || !own.Stored {
			continue
		}
		var stored []Slot
		for _, s := range all {
			if s.Stored && s.Job == own.Job {
				stored = append(stored, s)
			}
		}
		if newest, found := Newest(stored); found {
			steps[own.Job] = newest.Step
		}
	}
	return steps
}
