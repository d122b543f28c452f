package slots

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestWhatAWriterSays(t *testing.T) {
	writing := int64(9)
	for text, want := range map[string][]Disk{
		`{"/b": {"written": 7, "writing": 9, "nbytes": 5, "problem": null, "since": 1.5},
			"/a": {"written": -1, "writing": null, "nbytes": 0, "problem": "no space left", "since": 2}}`: {
			{Job: "j", Folder: "/a", Written: -1, Problem: "no space left", Since: 2},
			{Job: "j", Folder: "/b", Written: 7, Writing: &writing, Bytes: 5, Since: 1.5}},
		"":                            nil,
		"{}":                          nil,
		`{"/a": 3}`:                   nil,
		`{"/a": {"written": "many"}}`: nil,
		`[1]`:                         nil,
	} {
		assert.Equal(t, want, ReadDisks("j", []byte(text)), text)
	}
	long := ReadDisks("j", []byte(`{"/a": {"problem": "`+strings.Repeat("x", 5000)+`"}}`))
	assert.Len(t, long[0].Problem, longestProblem)
}

func TestTheProblemThatHasLastedLongest(t *testing.T) {
	_, found := Trouble([]Disk{{Folder: "/a", Written: 3}})
	assert.False(t, found)
	worst, found := Trouble([]Disk{{Folder: "/a", Problem: "full", Since: 9}, {Folder: "/b", Since: 1},
		{Folder: "/c", Problem: "hangs", Since: 4}})
	assert.True(t, found)
	assert.Equal(t, "/c", worst.Folder)
}
