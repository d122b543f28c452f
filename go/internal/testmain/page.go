package testmain

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Row returns the list that a page of docs has for a file: the second cell of the row that begins with the
// file, split at a separator. Tests compare it with the code, so that the page stays correct.
func Row(t testing.TB, page, file, separator string) []string {
	t.Helper()
	for _, line := range lines(t, page) {
		if row, found := strings.CutPrefix(line, "| `"+file+"` | "); found {
			return strings.Split(strings.TrimSuffix(row, " |"), separator)
		}
	}
	t.Fatalf("docs/%s has no row of %s", page, file)
	return nil
}

// Table returns the first and the second cell of each row, in those tables of a page whose first column has
// this name.
func Table(t testing.TB, page, name string) (rows [][2]string) {
	t.Helper()
	in := false
	for _, line := range lines(t, page) {
		text, row := strings.CutPrefix(line, "| ")
		cells := strings.SplitN(strings.TrimSuffix(text, "|"), " | ", 2)
		switch {
		case row && cells[0] == name:
			in = true
		case !strings.HasPrefix(line, "|"):
			in = false
		case in && row && len(cells) == 2:
			rows = append(rows, [2]string{cells[0], strings.TrimSpace(cells[1])})
		}
	}
	return rows
}

// lines returns the lines of a page. The folder docs is in one of the parent folders.
func lines(t testing.TB, page string) []string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if text, err := os.ReadFile(filepath.Join(dir, "docs", page)); err == nil {
			return strings.Split(string(text), "\n")
		}
		if dir == filepath.Dir(dir) {
			t.Fatalf("there is no docs/%s", page)
		}
		dir = filepath.Dir(dir)
	}
}
