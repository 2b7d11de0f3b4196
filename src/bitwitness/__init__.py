"""bitwitness: are the numbers of your training run true?"""
